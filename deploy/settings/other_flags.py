"""Flags that other servers have and `serve` and `batch` have not, and what to do instead. A name that we have is never
looked up here.
"""

from collections.abc import Mapping

_HOW_PACKED = "how weights are packed is read from the checkpoint; leave it out"
_NO_LORA = "adapters (LoRA) are not served; merge them into the checkpoint"
_NO_DRAFTS = "there is no speculative decoding; leave it out"
_TOOLS = "calls are found by the format that the template shows, or --tool-call-parser names; leave it out"
_GRAPHS = "the sizes of recorded steps are chosen by the server; --enforce-eager records none"
_CHUNKS = "prompts are always computed in pieces; --max-prefill-chunk-tokens says how large they may be"
_RANKS = "only tensor parallelism splits a model: --tensor-parallel-size N"
_REPLICAS = (
    "for several engines, give num_replicas to intarsia.deploy.serve_app:app, or --num-engines to intarsia batch"
)
_HUB_NAME = "a name on the Hub is the argument itself, as in `intarsia serve ORGANISATION/MODEL`"
_HUB_PLACE = "the variables of the Hub's own tools say where models are kept: HF_HUB_CACHE, HF_HOME"
_HUB_TOKEN = "`hf auth login` keeps a token for the Hub, or HF_TOKEN gives one"
_HUB_REVISION = "--revision says it for the model and its tokenizer"
_REQUEST = "each request says it for itself"
_CORS = "--allowed-origins says which pages may ask; methods and headers need no leave"
_MEMORY = "--kv-cache-memory says how much memory keys and values have, as 4GiB"
_THE_MODEL = "the model is the argument itself, as in `intarsia serve MODEL_DIR`"
_LENGTH = "--max-model-len says how many tokens a request may have"
_CHOSEN = "it is chosen by the server; leave it out"

VLLM: Mapping[str, str] = {
    "--model": _THE_MODEL,
    "--seed": f"{_REQUEST} (seed)",
    "--quantization": _HOW_PACKED,
    "-q": _HOW_PACKED,
    "--kv-cache-dtype": "keys and values are kept in the model's dtype; --dtype changes both",
    "--calculate-kv-scales": "keys and values are kept in the model's dtype; leave it out",
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--max-lora-rank": _NO_LORA,
    "--pipeline-parallel-size": _RANKS,
    "-pp": _RANKS,
    "--data-parallel-size": _REPLICAS,
    "-dp": _REPLICAS,
    "--api-server-count": _REPLICAS,
    "--enable-expert-parallel": "experts are cut along their inner dimension, each rank has a slice; leave it out",
    "--decode-context-parallel-size": _RANKS,
    "--speculative-config": _NO_DRAFTS,
    "--speculative-model": _NO_DRAFTS,
    "--num-speculative-tokens": _NO_DRAFTS,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-parser-plugin": _TOOLS,
    "--enable-reasoning": "reasoning is told apart where the format is known; --reasoning-parser names one",
    "--guided-decoding-backend": "answers of a given form are made by llguidance; leave it out",
    "--structured-outputs-config": "answers of a given form are made by llguidance; leave it out",
    "--enable-log-requests": "--request-log line, or json, writes a line of each request",
    "--uvicorn-log-level": "--log-level says what is logged, and --request-log line writes a line of each request",
    "--disable-log-requests": "requests are not logged unless it is asked for; leave it out",
    "--no-enable-log-requests": "requests are not logged unless it is asked for; leave it out",
    "--disable-log-stats": "figures are at /metrics and on the console, and not logged; leave it out",
    "--cpu-offload-gb": "weights stay on their device; --tensor-parallel-size spreads them over several",
    "--max-logprobs": "its limit is fixed; what a request may ask for is told where it asks for more",
    "--tokenizer-mode": _CHOSEN,
    "--tokenizer-revision": _HUB_REVISION,
    "--code-revision": _HUB_REVISION,
    "--hf-token": _HUB_TOKEN,
    "--download-dir": _HUB_PLACE,
    "--hf-config-path": "config.json is read from the model's folder; put it there",
    "--hf-overrides": "config.json is taken as it is; change it in a copy of the model's folder",
    "--rope-scaling": "config.json is taken as it is (rope_scaling); change it in a copy of the model's folder",
    "--rope-theta": "config.json is taken as it is (rope_theta); change it in a copy of the model's folder",
    "--load-format": "only safetensors are read; leave it out",
    "--config-format": "only config.json is read; leave it out",
    "--task": "models generate text here; embeddings and scores are not served",
    "--runner": "models generate text here; embeddings and scores are not served",
    "--convert": "models generate text here; embeddings and scores are not served",
    "--limit-mm-per-prompt": "--max-images-per-request says how many images a request may have",
    "--mm-processor-kwargs": "images are read as the checkpoint's own files say; leave it out",
    "--enable-chunked-prefill": _CHUNKS,
    "--long-prefill-token-threshold": _CHUNKS,
    "--max-num-partial-prefills": _CHUNKS,
    "--compilation-config": "--torch-compile compiles the model",
    "-O": "--torch-compile compiles the model",
    "--max-seq-len-to-capture": _GRAPHS,
    "--cuda-graph-sizes": _GRAPHS,
    "--device": "GPUs are used where Ray has them, else the CPU; CUDA_VISIBLE_DEVICES chooses among them",
    "--distributed-executor-backend": "workers are always Ray's; leave it out",
    "--num-gpu-blocks-override": _MEMORY,
    "--kv-cache-memory-bytes": _MEMORY,
    "--kv-transfer-config": "keys and values stay with their engine; leave it out",
    "--scheduling-policy": "requests always have a priority, and tenants take turns; leave it out",
    "--preemption-mode": "--swap-space says how much host memory preempted requests may have",
    "--disable-sliding-window": "windows are the model's own; --disable-hybrid-kv-cache-manager keeps every token",
    "--allow-credentials": _CORS,
    "--allowed-methods": _CORS,
    "--allowed-headers": _CORS,
    "--ssl-cert-reqs": "--ssl-ca-certs asks clients for a certificate",
    "--ssl-keyfile-password": "the key's file must be readable without a password",
    "--uds": "the server listens at --host and --port",
    "--chat-template-content-format": "parts of a message are given as the template wants them; leave it out",
    "--trust-request-chat-template": "templates come with the server, --chat-template FILE, not with requests",
    "--override-generation-config": f"{_REQUEST}; --generation-config none leaves the checkpoint's out",
    "--return-tokens-as-token-ids": f"{_REQUEST} (return_token_ids)",
    "--enable-prompt-tokens-details": "usage always tells how many tokens were found in the cache; leave it out",
    "--async-scheduling": _CHOSEN,
}

SGLANG: Mapping[str, str] = {
    "--model-path": _THE_MODEL,
    "--tokenizer-path": "--tokenizer FOLDER names another folder",
    "--tp": "--tensor-parallel-size N, or -tp N",
    "--tp-size": "--tensor-parallel-size N, or -tp N",
    "--dp": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--context-length": _LENGTH,
    "--mem-fraction-static": "--gpu-memory-utilization says which share of a GPU's memory is used",
    "--chunked-prefill-size": _CHUNKS,
    "--max-running-requests": "--max-num-seqs says how many requests a step has",
    "--max-total-tokens": _MEMORY,
    "--disable-radix-cache": "--no-enable-prefix-caching turns the prefix cache off",
    "--disable-cuda-graph": "--enforce-eager records no steps",
    "--enable-torch-compile": "--torch-compile compiles the model",
    "--schedule-policy": "--longest-prefix-first prefers who has most in the cache",
    "--grammar-backend": "answers of a given form are made by llguidance; leave it out",
}

LLAMA_CPP: Mapping[str, str] = {
    "-m": _THE_MODEL,
    "-hf": _HUB_NAME,
    "-c": _LENGTH,
    "--ctx-size": _LENGTH,
    "-np": "--max-num-seqs says how many requests a step has",
    "--parallel": "--max-num-seqs says how many requests a step has",
    "-ngl": "a model is on its GPUs as a whole; leave it out",
    "--n-gpu-layers": "a model is on its GPUs as a whole; leave it out",
    "--threads": "--cpu-threads N",
    "-t": "--cpu-threads N",
    "--jinja": "the checkpoint's chat template is always used; leave it out",
    "--chat-template-file": "--chat-template FILE",
}

OTHER_FLAGS: Mapping[str, str] = {**LLAMA_CPP, **SGLANG, **VLLM}
