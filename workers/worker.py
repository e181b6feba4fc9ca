"""A tensor-parallel worker: loads its share of a model, lays out its pages, runs the steps it is sent.

A plain class; `actor.py` puts it into a Ray actor.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from ..environment import give_back_freed_memory, resident_bytes, threads_per_worker
from ..errors import IntarsiaError
from ..kvcache.plan import MemoryPlan
from ..proto.channel import Address, Begun, BlockingServer, CorruptFrame, reading
from ..proto.codec import pack, unpack
from ..proto.step import Fault, Step, StepResult
from ..proto.tracing import Tracer, tracer_of
from ..proto.worker import ModelFacts, ModelSettings, RunnerLimits, WorkerStatus
from .collectives import make_collectives
from .cpu.threads import Threads
from .grammar.matcher import Grammars
from .launched import Drawn, Launched
from .layers.positions import settle_frequencies
from .memory import await_freed_memory, check_device, device_memory, is_lack_of_memory, spare_bytes
from .models.load import blaming_config, load_model
from .models.loaded_model import LoadedModel
from .runner import ModelRunner
from .tensor_parallel import TensorParallel
from .warm_up import record_all, run_largest_steps, unseen_bytes, warm_up

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # for the answer of a step that failed to leave the process
GIVE_BACK_EVERY_S = 30.0  # freed memory is kept for the next tensor of its size, but not for ever
CONTROLLER_TIMEOUT_S = 60.0  # for the controller to connect once it knows where: it may have died in between


T = TypeVar("T")


class Failure(NamedTuple):
    """Why a step has no tokens."""

    error: str
    fault: Fault


class OngoingStep(NamedTuple):
    """A step that this rank has begun."""

    result: Callable[[], StepResult]  # waits for it
    has_ended: Callable[[], bool]


class Worker:
    """One rank. `load`, then `allocate`, then any number of steps; both may be called again for another model."""

    def __init__(self, rank: int = 0, size: int = 1, local_workers: int = 1):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._parallel = TensorParallel(rank, size, make_collectives(rank, size, self._device) if size > 1 else None)
        self._local_workers = local_workers
        torch.set_num_threads(threads_per_worker(local_workers))
        self._settings: ModelSettings | None = None
        self._model: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._allocated: tuple[MemoryPlan, RunnerLimits] | None = None
        self._spare: tuple[tuple[MemoryPlan, RunnerLimits, float], int] | None = None  # asked, answered
        self._grammars: Grammars | None = None
        self._steps: BlockingServer | None = None
        self._break_off: Callable[[], None] = lambda: None
        self._tracer: Tracer | None = None
        self._steps_run = self._run_us = 0
        self._ended_s = 0.0  # the latest step
        self._gave_back_s = time.monotonic()
        self.loaded = (0, 0)  # parameters that are there, and all of them; read by another thread

    def meeting_point(self, host: str) -> Address:
        """Where the other ranks find this one."""
        return self._parallel.collectives.meeting_point(host)

    def join(self, addresses: Sequence[Address]) -> None:
        """Meet the other ranks, given the meeting points of all in rank order."""
        if self._runner is not None and self._runner.graphs is not None:
            self._runner.graphs.forget()  # what is recorded would call into what is taken apart here
        self._parallel.collectives.join(addresses)

    def load(self, settings: ModelSettings, may_keep: bool = False) -> ModelFacts:
        """Read this rank's share of the weights. Raises `ModelError` or `InvalidSetting`.

        may_keep: not if they are those of the model that is there
        """
        if may_keep and self._model is not None and self._settings == settings:
            return self._model.facts
        check_device(self._device)
        self._runner = self._model = self._allocated = self._spare = None  # free the old model first
        await_freed_memory(self._device)
        self._settings = settings
        self._tracer = self._tracer or tracer_of("worker", settings.traces_endpoint, rank=self._parallel.rank)
        self._model = load_model(settings, self._parallel, self._device, self._note_loaded)
        facts = self._model.facts
        self._grammars = Grammars(settings.text_dir, settings.trust_remote_code, facts.vocab_size, facts.eos_token_ids)
        return facts

    def prepare_form(self, kind: str, text: str) -> None:
        """Compile the form of an answer, while steps go on. Raises `InvalidRequest`, naming the field."""
        assert self._grammars is not None, "load a model first"
        self._grammars.prepare(kind, text)

    def _note_loaded(self, done: int, total: int) -> None:
        self.loaded = (done, total)

    def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        """Lay out the pages, and run the model once over them. Raises `UnsupportedModel` when it cannot run."""
        assert self._model is not None and self._settings is not None, "load a model first"
        self._runner = self._allocated = None
        with blaming_config(self._settings.model_dir):
            self._model.allocate(plan, self._settings.attention_backend)
            self._runner = self._new_runner(plan, limits)
            warm_up(self._runner, self._settings)
        self._allocated = plan, limits

    def keeps(self, plan: MemoryPlan, limits: RunnerLimits) -> bool:
        """Whether just that is allocated."""
        return self._allocated == (plan, limits)

    def clear(self) -> None:
        """Forget all requests. Weights and pages stay; what is in the pages belongs to no request."""
        assert self._runner is not None, "allocate first"
        self._runner.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # a step may not have fitted beside what was kept for the next
        record_all(self._runner)  # anew, if the ranks have met anew

    def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        """Bytes left for pages when the engine takes `share` of the device's memory; None where a device has none of
        its own. trial: a small plan, to run the largest steps over."""
        memory = device_memory(self._device)
        if memory is None:
            return None
        assert self._model is not None and self._settings is not None, "load a model first"
        asked = trial, limits, share
        if self._spare is not None and self._spare[0] == asked:
            return self._spare[1]  # the pages of the plan that was made of it are still there
        backend = self._settings.attention_backend
        self._allocated = None
        with blaming_config(self._settings.model_dir):
            self._model.allocate(trial, backend)
            runner = self._new_runner(trial, limits)
            unseen = unseen_bytes(runner, self._settings, memory)
            work = partial(run_largest_steps, runner, backend)
            spare = spare_bytes(memory, share, work, trial.memory_bytes, unseen)
        self._spare = asked, spare
        return spare

    def _new_runner(self, plan: MemoryPlan, limits: RunnerLimits) -> ModelRunner:
        assert self._model is not None and self._settings is not None and self._grammars is not None
        settle_frequencies(self._model.module, limits.max_model_len)
        threads = Threads.of_worker(self._local_workers, self._device, self._settings.cpu_threads)
        return ModelRunner(self._model, plan, limits, self._parallel, self._grammars, threads)

    def run(self, step: Step) -> StepResult:
        """One step, from its beginning to its end. A failure is an answer too: the controller decides what becomes of
        the requests."""
        return self.launch(step).result()

    def launch(self, step: Step) -> "OngoingStep":
        """Begin a step. The next one may be begun before this one has ended; results are asked for in order."""
        runner = self._runner
        assert runner is not None, "load a model and allocate its pages first"
        started_s = time.monotonic()
        launched, failure = self._attempt(step, lambda: runner.launch(step), Launched(Drawn))
        return OngoingStep(partial(self._end, step, launched, failure, started_s), launched.has_ended)

    def _end(self, step: Step, launched: Launched, failure: Failure | None, started_s: float) -> StepResult:
        """failure: why it could not be launched"""
        drawn, later_failure = self._attempt(step, launched.finish, Drawn())
        failure = failure or later_failure
        # A step begins when the one before it has ended.
        started_s, self._ended_s = max(started_s, self._ended_s), time.monotonic()
        run_us = int((self._ended_s - started_s) * 1e6)
        if step.traces and self._tracer is not None:
            about = {"intarsia.step": step.number, "intarsia.rank": self._parallel.rank}
            self._tracer.record("step", step.traces, started_s, self._ended_s, about)
        self._steps_run += 1
        self._run_us += run_us
        return StepResult(step.epoch, step.number, *drawn, run_us, *(failure or (None, None)))

    def _attempt(self, step: Step, work: Callable[[], T], otherwise: T) -> tuple[T, Failure | None]:
        try:
            return work(), None
        except ConnectionError as error:
            return otherwise, Failure(f"{type(error).__name__}: {error}", Fault.PEER)
        except Exception as error:
            logger.exception("step %d failed on rank %d", step.number, self._parallel.rank)
            self._leave_others()
            fault = Fault.MEMORY if is_lack_of_memory(error) else Fault.OTHER
            return otherwise, Failure(f"{type(error).__name__}: {error}", fault)

    def _leave_others(self) -> None:
        """No rank may wait for one that failed. NCCL lets go of a process only when it has ended."""
        self._break_off()
        if self._device.type == "cuda" and self._parallel.size > 1:
            threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()

    def status(self) -> WorkerStatus:
        """How this rank is, asked while steps go on."""
        memory = device_memory(self._device)
        return WorkerStatus(
            process_id=os.getpid(),
            host=socket.gethostname(),
            device=str(self._device),
            memory_bytes=resident_bytes(),
            device_used_bytes=memory.held() if memory is not None else None,
            device_bytes=memory.total() if memory is not None else None,
            steps=self._steps_run,
            run_us=self._run_us,
            cpu_s=time.process_time(),
        )

    def listen(self, host: str) -> tuple[Address, Address]:
        """Where the controller finds us: for steps, and for control, which has a thread of its own."""
        self._steps, control = BlockingServer(host, CONTROLLER_TIMEOUT_S), BlockingServer(host, CONTROLLER_TIMEOUT_S)
        if self._parallel.size > 1:
            self._break_off = self._parallel.collectives.breaker()
        break_off = self._break_off  # of these ranks: they may have met anew by then

        def serve() -> None:
            control.serve(self._answer_control)
            break_off()  # the controller has gone or given up on a rank: no rank may wait for another in vain

        threading.Thread(target=serve, name="control", daemon=True).start()
        return self._steps.address, control.address

    def serve(self) -> None:
        """Take steps from the controller until it leaves or has something else for us.

        In the process's first thread. OpenMP counts it among those that compute, and where more threads do than there
        are cores, its helpers go to sleep at once whenever they wait: a step of 32 requests took 16 ms so.
        """
        assert self._steps is not None, "listen first"
        self._steps.serve_ahead(self._begin_step, self._give_back_now_and_then)

    def _begin_step(self, payload: bytes) -> Begun:
        with reading("a step"):
            step = Step.unpack(payload)
        ongoing = self.launch(step)
        return Begun(lambda: ongoing.result().pack(), ongoing.has_ended)

    def _give_back_now_and_then(self) -> None:
        """After an answer, so that only the next step waits for this."""
        if time.monotonic() - self._gave_back_s > GIVE_BACK_EVERY_S:
            self._gave_back_s = time.monotonic()
            give_back_freed_memory()

    def _answer_control(self, payload: bytes) -> bytes:
        with reading("a question"):
            number, verb, *arguments = unpack(payload)
        if verb == "loaded":
            return pack([number, self.loaded, None])
        if verb == "status":
            return pack([number, self.status(), None])
        if verb != "form" or [type(argument) for argument in arguments] != [str, str]:
            raise CorruptFrame(f"a worker answers 'loaded', 'status' and 'form', not {verb!r:.80}")
        try:
            self.prepare_form(*arguments)
        except IntarsiaError as error:
            return pack([number, None, error.to_wire()])
        except Exception as error:  # ours, and answered as such; the thread goes on
            logger.exception("a form could not be compiled")
            return pack([number, None, IntarsiaError(f"{type(error).__name__}: {error}").to_wire()])
        return pack([number, None, None])
