from intarsia.proto.step import Admit, Advance, Logprobs, PromptLogprobs, Sampling, Step, StepResult


def test_step_survives_the_wire():
    sampling = Sampling(0.7, 40, 0.9, 2**63 - 1, -1)
    admit = Admit(4, (1, 2, 3), 0, ((1, 0), (2, 9)), sampling)
    step = Step(
        epoch=3,
        number=17,
        retire=(4, 5),
        swap_out=((0, 3, 9),),
        swap_in=((1, 8, 2),),
        forget=(7,),
        copies=((0, 7, 8),),
        saves=((4, 1, 2, 6),),
        admit=(admit,),
        advance=(Advance(4, 3, ()),),
        decode=(1, 2),
        traces=("00-1-2-01",),
    )
    assert Step.unpack(step.pack()) == step


def test_result_survives_the_wire():
    row = Logprobs(-0.25, ((99, -0.25), (7, -3.5)))
    about_prompts = (PromptLogprobs(5, 1, (row, Logprobs(-1.5, ()))),)
    result = StepResult(3, 17, (99, 1), ((0, row),), about_prompts, ((1, "why"),), 850)
    assert StepResult.unpack(result.pack()) == result


def test_quiet_decode_step_of_256_requests_packs_below_1_kilobyte():
    step = Step(1, 100_000, (), (), (), (), (), (), (), (), tuple(range(256)))
    assert len(step.pack()) < 1024
    assert Step.unpack(step.pack()) == step
