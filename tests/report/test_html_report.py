"""The page: what it says is what was recorded, nothing in it runs or loads, and hostile names stay text."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import build_checkpoint

from trilobite.checkpoint.evaluation import save_evaluation
from trilobite.checkpoint.packed import REPORT, TIMES
from trilobite.errors import CheckpointError, SettingError
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.run.compress import compress
from trilobite.quantize.run.lines import NTH_EXPERT
from trilobite.quantize.run.options import Options
from trilobite.recipe import load_recipe
from trilobite.report import figures, several, svg
from trilobite.report.make import make_report
from trilobite.report.read import Packed, label, read_packed

pytest.importorskip("matplotlib")
RECIPE = replace(load_recipe("milo-s1"), rank="dense-4+sparse-2", iterations=3, cap=False)
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">$\\frac{\x00\ud800"\'&'
SCORE = {"text": "wiki.txt", "context": 64, "windows": 2, "perplexity": 7.5, "kl": 0.25, "top1": 0.75}
SCORE["reference_perplexity"] = 7.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    build_checkpoint("mixtral", path / "original", dtype=torch.bfloat16)
    compress(str(path / "original"), path / "packed", RECIPE, options=Options(jobs=1, device="cpu"))
    save_evaluation(path / "packed", SCORE)
    return path / "packed"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_planned_recipe_says_why(folder: Path, tmp_path: Path) -> None:
    budget = Budget(bits=3.4, importance="none")
    compress(folder.parent / "original", tmp_path / "packed", budget, options=Options(jobs=1, device="cpu"))
    page = Page(make_report([read_packed(tmp_path / "packed")]))
    text = " ".join(page.text)
    assert "Why each part got what it got" in text
    assert "bits-3.4" in text
    assert "gate, up" in text
    found = read_packed(tmp_path / "packed").planner
    assert found is not None
    assert found.least < found.nbytes < found.most
    assert sum(p.nbytes for p in found.parts) == found.nbytes

    report = tmp_path / "packed" / REPORT
    report.write_text(report.read_text().replace('"choices": [', '"choices": [[], ', 1))
    with pytest.raises(CheckpointError, match="damaged"):
        read_packed(tmp_path / "packed")


class Page(HTMLParser):
    """Every element with its attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def assert_harmless(page: Page) -> None:
    """Nothing runs, nothing is loaded, and no two elements share an id."""
    ids = []
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "link", "foreignobject", "a", "img", "base")
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            if key in ("href", "xlink:href", "src"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,")), value
            if key == "style":
                assert "url(" not in (value or "").replace("url(#", "")
        if "id" in attributes:
            ids.append(attributes["id"])
    assert len(ids) == len(set(ids))
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy


def rewrite(path: Path, change: Any) -> None:
    report = json.loads((path / REPORT).read_text())
    change(report)
    (path / REPORT).write_text(json.dumps(report))


def test_the_page(folder: Path) -> None:
    packed = read_packed(folder)
    text = make_report([packed])
    page = Page(text)
    assert_harmless(page)
    assert text.count("<svg") == text.count("</svg>") == 5
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert svg.INK not in text
    shown = " ".join(page.text)
    for role in packed.made.roles:
        assert f"{role.bytes:,}" in shown
        assert f"{role.bits_per_weight:.3f}" in shown
    worst = max(packed.quantized, key=lambda row: row["error"])
    assert worst["name"] in shown
    assert f"{worst['error']:.4f}" in shown
    for value in ("7.50000", "0.25000", "0.75000", "7.00000"):
        assert value in shown
    assert "not recorded" not in shown
    shares = sorted(
        row["residual_share"]
        for row in packed.quantized
        if row["role"] == "expert" and row["expert"] % NTH_EXPERT == 0
    )
    assert f"{100 * shares[len(shares) // 2]:.0f} %" in shown
    assert all(0 < share < 1 for share in shares)


def test_equal_checkpoints_give_equal_pages(folder: Path) -> None:
    assert make_report([read_packed(folder)]) == make_report([read_packed(folder)])


def test_hostile_names_are_text(copy: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        report["identity"]["recipe"]["name"] = report["source"] = report["rank"] = HOSTILE
        for row in report["tensors"]:
            row["name"] = row["name"].replace("self_attn", HOSTILE)
            if "kept" in row:
                row["kept"] = HOSTILE
            elif row["role"] == "attention":
                row["error"] = 0.9

    rewrite(copy, change)
    save_evaluation(copy, {**SCORE, "text": HOSTILE, "tasks": {HOSTILE: {HOSTILE: 1.0, "n": 1}}})
    packed = read_packed(copy)
    for text in (make_report([packed]), make_report([packed, packed])):
        text.encode()
        page = Page(text)
        assert_harmless(page)
        assert "<script>alert(1)</script>" in "".join(page.text)


def test_older_files_are_read(copy: Path) -> None:
    """Releases before the report recorded neither kurtosis nor rounds, and no seconds."""

    def change(report: dict[str, Any]) -> None:
        for row in report["tensors"]:
            row.pop("kurtosis", None)
            row.pop("errors", None)

    rewrite(copy, change)
    (copy / TIMES).unlink()
    shown = " ".join(Page(make_report([read_packed(copy)])).text)
    assert "Rounds: not recorded." in shown
    assert "Seconds of each tensor: not recorded." in shown
    assert shown.count("not recorded") == 2 * 3 + 2


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "seconds": {"a": "b"}}'])
def test_times_that_cannot_be_read_are_not_recorded(copy: Path, text: str) -> None:
    (copy / TIMES).write_text(text)
    assert read_packed(copy).seconds == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("error", "x"), ("error", float("nan")), ("rank", -1), ("shape", [1, "2"]), ("errors", 3), ("name", 1)],
)
def test_a_damaged_row_is_one_line(copy: Path, key: str, value: Any) -> None:
    def change(report: dict[str, Any]) -> None:
        next(row for row in report["tensors"] if "format" in row)[key] = value

    rewrite(copy, change)
    with pytest.raises(CheckpointError, match="damaged"):
        read_packed(copy)


def test_calibration_tokens_are_drawn(copy: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        for row in report["tensors"]:
            if row["role"] == "expert":
                row |= {"tokens": 100 + row["expert"], "own": 0.25}

    rewrite(copy, change)
    shown = " ".join(Page(make_report([read_packed(copy)])).text)
    assert "24 matrices were calibrated, on 100 to 103 tokens; for 24 of them" in shown
    assert "Tokens that calibrated every expert." in shown


# Figures.


def drawn(draw: Any) -> Any:
    with svg.drawing():
        axes = figures.new_figure(4, 3).subplots()
        draw(axes)
    return axes


def test_cells_of_the_layer_map_are_means(folder: Path) -> None:
    rows = [row for row in read_packed(folder).quantized if "layer" in row]
    axes = drawn(lambda axes: figures.layer_map(axes, rows, lambda row: row["error"], "error"))
    grid = np.asarray(axes.images[0].get_array())
    columns = list(dict.fromkeys(label(row["name"]) for row in rows))
    assert grid.shape == (2, len(columns)) == (2, 7)
    for layer in range(2):
        for i, column in enumerate(columns):
            own = [r["error"] for r in rows if r["layer"] == layer and label(r["name"]) == column]
            assert grid[layer, i] == pytest.approx(sum(own) / len(own))


def test_cells_of_the_expert_map_are_means(folder: Path) -> None:
    rows = read_packed(folder).quantized
    axes = drawn(lambda axes: figures.expert_map(axes, rows, lambda row: row["error"], "error"))
    grid = np.asarray(axes.images[0].get_array())
    assert grid.shape == (2, 4)
    own = [r["error"] for r in rows if r.get("layer") == 1 and r.get("expert") == 3]
    assert len(own) == 3
    assert grid[1, 3] == pytest.approx(sum(own) / 3)


def test_layers_of_encoder_and_decoder_are_told_apart() -> None:
    where = [("decoder", 0), ("encoder", 1), ("encoder", 0), ("decoder", 0)]
    rows = [
        {"name": f"{s}.block.{n}.layer.1.mlp.experts.expert_0.wi.weight", "stack": s, "layer": n, "expert": 0}
        | {"error": float(i)}
        for i, (s, n) in enumerate(where)
    ]
    axes = drawn(lambda axes: figures.expert_map(axes, rows, lambda row: row["error"], "error"))
    assert np.asarray(axes.images[0].get_array()).flatten().tolist() == [2, 1, 1.5]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["encoder 0", "encoder 1", "decoder 0"]


def test_rounds_are_recorded_and_drawn(folder: Path) -> None:
    rows = [row for row in read_packed(folder).quantized if "errors" in row]
    assert len(rows) == 2 * (4 + 12)
    assert all(len(row["errors"]) == row["iterations"] <= 3 for row in rows)
    axes = drawn(lambda axes: figures.convergence(axes, [rows[0]]))
    assert list(axes.lines[0].get_ydata()) == rows[0]["errors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "self_attn.q_proj"),
        ("model.layers.12.mlp.experts.31.up_proj.weight", "mlp.experts.up_proj"),
        ("decoder.block.3.layer.1.mlp.experts.expert_4.wi.weight", "decoder layer.1.mlp.experts.wi"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_labels(name: str, expected: str) -> None:
    assert label(name) == expected


@pytest.mark.parametrize(("ending", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_figure_of_its_own(folder: Path, tmp_path: Path, ending: str, begin: bytes) -> None:
    path = tmp_path / f"figure.{ending}"
    with svg.drawing():
        svg.save(figures.overview(read_packed(folder)), path)
    assert path.read_bytes().startswith(begin)


def test_other_endings_are_refused() -> None:
    with pytest.raises(SettingError, match=re.escape(".png or .svg")):
        svg.check_ending(Path("figure.pdf"))


# Several.


def measured(packed: Packed, name: str, nbytes: int, perplexity: float, text: str = "wiki.txt") -> Packed:
    made = replace(packed.made, bytes_on_disk=nbytes)
    entry = {**SCORE, "text": text, "perplexity": perplexity, "kl": perplexity / 100}
    return replace(packed, name=name, made=made, measured=[entry])


def test_the_line_joins_what_no_other_beats(folder: Path) -> None:
    points = [(1_000_000, 9.0, "a"), (2_000_000, 8.0, "b"), (3_000_000, 8.5, "worse"), (4_000_000, 7.0, "c")]
    axes = drawn(lambda axes: several._front(axes, points))
    assert list(axes.lines[0].get_xdata()) == [1, 2, 4]
    assert list(axes.lines[0].get_ydata()) == [9, 8, 7]
    assert len(axes.collections[0].get_offsets()) == 4


def test_differences(folder: Path) -> None:
    packed = read_packed(folder)
    pair = [measured(packed, "first", 10**6, 9.0), measured(packed, "second", 2 * 10**6, 8.0)]
    page = Page(make_report(pair))
    assert_harmless(page)
    shown = " ".join(page.text)
    assert "1,000,000" in shown
    assert "wiki.txt, 2 windows of 64 tokens" in shown
    assert "9.00000" in shown
    assert "recipe" not in shown.partition("Differences")[2].partition("role")[0]  # they are equal


def test_translators_compare_by_bleu(folder: Path) -> None:
    packed = read_packed(folder)
    pair = []
    for name, nbytes, bleu in (("worse", 2 * 10**6, 30.0), ("better", 10**6, 31.5)):
        scores = {
            "files": ["a.en", "a.de"],
            "beams": 5,
            "bleu": bleu,
            "chrf": bleu + 25,
            "reference_bleu": 32.0,
        }
        made = replace(packed.made, bytes_on_disk=nbytes)
        pair.append(replace(packed, name=name, made=made, measured=[{"translation": scores}]))
    shown = " ".join(Page(make_report(pair)).text)
    assert "a.en to a.de, beams 5; the line joins what no other beats in both" in shown
    assert "chrF" in shown
    points = [(2, 30.0, "worse"), (1, 31.5, "better"), (3, 32.0, "best")]
    axes = drawn(lambda axes: several._front(axes, points, max))
    assert list(axes.lines[0].get_ydata()) == [31.5, 32.0]


def test_other_texts_do_not_compare(folder: Path) -> None:
    packed = read_packed(folder)
    pair = [measured(packed, "a", 1, 9.0), measured(packed, "b", 2, 8.0, text="other.txt")]
    assert "no two of these were measured on the same windows" in " ".join(Page(make_report(pair)).text)
