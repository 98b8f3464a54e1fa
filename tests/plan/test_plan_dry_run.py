"""What dry runs share: their result is printed or returned, and what is not known is named."""

from qat_lora.options import EstimateOptions, RunConfig
from qat_lora.plan.dry_run import DryRun, check_cache, device_of, replicas_of
from qat_lora.registry import Requirements
from qat_lora.runtime.launch.select import ChipsConfig


def test_people_get_the_text_and_programs_the_report(capsys):
    dry = DryRun({"steps": 3}, "three steps", Requirements("this run", 1, 1, 1))
    assert dry.show(RunConfig()) == {"steps": 3} and capsys.readouterr().out == "three steps\n"
    assert dry.show(RunConfig(json=True)) == {"steps": 3} and capsys.readouterr().out == ""


def test_what_a_machine_elsewhere_has_is_assumed_and_said():
    assumed: list[str] = []
    assert replicas_of(RunConfig(device="cpu"), assumed) == 1 and not assumed
    assert device_of(RunConfig(tpu=True)) == "tpu" and device_of(RunConfig(device="cuda")) == "cuda"
    run = RunConfig(device="cuda", chips=ChipsConfig(num_chips="all"))
    if replicas_of(run, assumed) == 1:  # there is no GPU here, or one
        assert all("give --num-chips N" in text for text in assumed)
    asked = EstimateOptions(model="m", length=1024, head_k=64)
    assert "rows of 1,024 tokens and 64 entries" in check_cache(None, asked, "c", None, "nothing")[0]
