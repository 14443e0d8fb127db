"""The command that measures a processor: its aims, and that parts fail, go on, and are kept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import llama
from benchmarks.lib.aims import OF, aims_table
from benchmarks.speed import attention, processor
from trilobite.kernels.cpu import engine

TIMES = {"gigabytes": 17.0, "probe": 30.0, "share": 0.69}
LAYERS = {
    "info": {"threads": 2},
    "tiers": [
        {"tier": tier, "mode": mode, "case": case, **TIMES}
        for tier in ("amx", "avx512", "avx2")
        for mode in ("exact", "int8")
        for case in ("Mixtral-8x7B int3-g64", "DeepSeek-MoE-16B int3-g64")
    ],
    "experts": [
        {"case": "Mixtral-8x7B int3-g64", "mode": "exact", **TIMES},
        {"case": "Mixtral-8x7B int3-g16-super", "mode": "exact", **TIMES},
    ],
}
STEP = {"layers": 2, "mode": "exact", "bound": 0.081, "now": 0.1, "matrices": 0.09}
STEPS = {"rows": [{"model": model, **STEP} for model in ("Mixtral-8x7B", "DeepSeek-MoE-16B")]}
PEERS = {
    "rows": [
        {
            "model": "Mixtral-8x7B",
            "tier": "avx2",
            "exact": {"tg": 10.0, "tg 8": 14.0, "pp 512": 1.0, "probe": 9.0},
            llama.LLAMA: {"tg": 10.0, "tg 8": 10.0, "pp 512": 9.0, "probe": 9.0},
        }
    ]
}
PROMPTS = {
    "peaks": {"exact": 1.0},
    "mixtral": {"seconds": {"exact": {"whole": 2.0}, "int8": {"whole": 1.0}, llama.LLAMA: {"whole": 3.0}}},
}
COMPRESS = {
    "models": [
        {"model": "Mixtral-8x7B", "milo-s1 (search)": 2500.0},
        {"model": "DeepSeek-MoE-16B", "milo-s1 (search)": 1.0},
    ],
    "speeds": [
        {"case": "search", "shape": [4, 8], "rate": 250.0},
        {"case": "rtn", "shape": [4, 8], "rate": 1.0},
    ],
}


@pytest.mark.parametrize(
    ("name", "found", "met"),
    [
        # By tier: 18, 17 and 13 GB/s exact, 18, 18 and 16 with int8, 16, of plain AVX2 13, with small experts.
        ("layers", LAYERS, [0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]),
        ("steps", STEPS, [0, 1, 1, 1]),
        ("peers", PEERS, [1, 0]),
        ("prompts", PROMPTS, [1]),
        ("compress", COMPRESS, [0, 1]),
    ],
)
def test_aims(name: str, found: Any, met: list[int]) -> None:
    aims = list(OF[name](found, "avx2"))
    assert [aim.met for aim in aims] == [bool(value) for value in met]
    table = aims_table(aims)
    assert table.startswith(f"{sum(met)} of {len(met)} are met.")
    assert table.count("**missed**") == len(met) - sum(met)


def test_a_memory_that_is_slower_has_lower_aims() -> None:
    slow = {**LAYERS, "tiers": [{**row, "probe": 18.0} for row in LAYERS["tiers"][:1]], "experts": []}  # type: ignore[index]
    (aim,) = OF["layers"](slow, "")
    assert aim.wanted == pytest.approx(0.9 * 18)
    assert aim.met


def test_parts_fail_go_on_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(title: str, *arguments: object) -> processor.Part:
        return processor.Part(
            title=title, script=attention, arguments=arguments, tables=["attention-prompts"], aims="compress"
        )

    known = {
        "wrong": part("Wrong", "--prompts", "none"),
        "right": part("Right", "--prompts", 3, "--repeats", 1),
    }
    monkeypatch.setattr(processor, "parts", lambda folder, others: known)
    monkeypatch.setattr(processor, "OF", {"compress": lambda found, cap: OF["compress"](COMPRESS, cap)})
    facts = {"cpu": {"model": "Abacus", "cores_usable": 2, "flags": ["beads"]}, "memory": {"total_GB": 1.5}}
    monkeypatch.setattr(processor.doctor, "examine", lambda: facts)
    page = tmp_path / "pages" / "mine.md"

    def run(*options: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["processor", str(tmp_path / "work"), "--page", str(page), *options])
        processor.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    with pytest.raises(SystemExit, match="1 parts failed: wrong"):
        run()
    assert "wrong: failed: " in (printed := capsys.readouterr().out)
    assert "right: 0." in printed
    assert not (tmp_path / "work/wrong.json").exists()
    assert "rows" in json.loads((tmp_path / "work/right.json").read_text())
    text = page.read_text()
    assert text.startswith("# Abacus\n")
    assert "2 cores with beads; 1.5 GB of memory." in text
    assert "1 of 2 are met." in text
    assert "heads" in text.partition("## Wrong")[2]

    found = run("--only", "right")
    assert found["failed"] == []
    assert found["aims"] == 2
    assert page.read_text().count("<!-- begin") == text.count("<!-- begin")

    with pytest.raises(SystemExit):
        run("--only", "none")
    assert "--only none: no such part; here are wrong, right" in capsys.readouterr().err


def test_what_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *_: object) -> None:
        raise subprocess.CalledProcessError(1, ["pip", "download"])

    monkeypatch.setattr(processor, "make_inputs", fail)
    monkeypatch.setattr(sys, "argv", ["processor", str(tmp_path), "--page", str(tmp_path / "page.md")])
    with pytest.raises(
        SystemExit, match=r"error: what is measured cannot be made \(Command '\['pip', 'download'\]'"
    ):
        processor.main()
    assert not (tmp_path / "page.md").exists()


@pytest.mark.skipif(not engine.available(), reason="no native CPU engine")
def test_parts_of_this_processor(tmp_path: Path) -> None:
    others = processor.capped()
    assert engine.info()["tier"] not in others
    found = processor.parts(tmp_path, others)
    assert [name for name in found if "-" not in name] == [
        "layers",
        "steps",
        "texts",
        "peers",
        "prompts",
        "compress",
    ]
    caps = {name.partition("-")[2] for name in found} - {""}
    assert caps <= set(others)
    tables = [name for part in found.values() for name in part.tables]
    assert len(set(tables)) == len(tables)
    assert all(part.script.__name__.startswith("benchmarks.speed") for part in found.values())
