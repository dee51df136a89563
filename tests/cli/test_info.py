"""`memcheck info` says what is there."""

import json

import pytest
import torch

import memcheck
from memcheck import _extension
from memcheck.__main__ import main

pytestmark = pytest.mark.extension


def test_json_is_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert main(["info", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["memcheck"] == memcheck.__version__
    assert facts["versions"]["torch"] == facts["build"]["torch"] == torch.__version__
    assert facts["cpu"]["level"] in facts["cpu"]["levels"]
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert len(facts["cuda"]["gpus"]) == torch.cuda.device_count()
    assert facts["allocator"]["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert all(operator.startswith("memcheck::") for operator in facts["kernels"])


def test_text_has_a_line_for_each_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for line in ("versions", f"  torch: {torch.__version__}", f"  level: {_extension._C.cpu_level()}", "allocator"):
        assert line in printed.splitlines()


def test_the_build_has_cuda_kernels_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--format", "json"])
    facts = json.loads(capsys.readouterr().out)
    if facts["build"]["cuda_toolkit"] is None:
        assert facts["build"]["cuda_left_out"]
        assert facts["cuda"]["launch"] is None
    else:
        launched = facts["cuda"]["launch"] == "ok"
        assert launched == torch.cuda.is_available()
    assert facts["build"]["extension"] == "loaded"
    assert facts["build"]["simulated_gpu"] == "built with the extension"
    on_cuda = any("CUDA" in devices for devices in facts["kernels"].values())
    assert on_cuda == (torch.version.cuda is not None)
