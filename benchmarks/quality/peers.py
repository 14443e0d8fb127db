"""What others lose at as many bits, in the same model on the same text.

    python -m benchmarks.quality.peers MODEL... --ggml libggml-base.so --ik libggml.so --python ENV/bin/python \
        --gptqmodel ENV2/bin/python --page docs/results.md

Every matrix of attention and MLPs is quantized by the others' own code, decoded, and put into the model; the head is
ours, in 8 bit, everywhere. Of llama.cpp and ik_llama.cpp all types alone, and the mixes of `llama-quantize`, which raise
some roles; where blocks do not divide a row, they fall back as there. HQQ and SINQ run in an environment that has both
packages, GPTQModel in another. Each only where its option is given.

Without data: no importance matrix for theirs; ours may read what comes along, or what the model writes itself. With
data (--data): the mean squares of what enters each column, or inputs of the same Hessian, on the same text for theirs
and ours. Bits are those of the quantized matrices, metadata included. What is found stays in the work folder: a run
that is stopped goes on. Rows that the page has and that this run does not measure stay there, if they are of the same
text; `--recipes` without names measures none without data. The last line is JSON.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.lib import other_quantizers
from benchmarks.lib.divergence import Found, Variant, divergences, packed_variant
from benchmarks.lib.ggml import Ggml
from benchmarks.lib.ggml_mixes import MIXES, Shape, type_in_mix
from benchmarks.lib.markdown import cells, fragment, table
from benchmarks.lib.packed import hessians, numel, pack
from benchmarks.lib.recipes import named, with_bits
from benchmarks.lib.scoring import build, decoded, open_bench
from benchmarks.lib.script import TRAINING_TEXT, add_page, add_text, add_work, parser, publish
from trilobite.checkpoint.roles import Matrix, read_matrix, text_config
from trilobite.checkpoint.source import open_source
from trilobite.quantize.budget.goal import Budget
from trilobite.quantize.calibrate.store import HessianStore
from trilobite.quantize.calibrate.windows import Calibration
from trilobite.quantize.run.calibrated import Calibrator
from trilobite.quantize.run.compress import prepare
from trilobite.recipe import PRESETS, Recipe, Role
from trilobite.runtime.mapped import map_files

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K")
IK_TYPES = ("IQ2_KT", "IQ2_KS", "IQ2_K", "IQ2_KL", "IQ3_KT", "IQ3_KS", "IQ3_K", "IQ4_KSS", "IQ4_KS", "IQ4_K")
BUDGETS = (2.0, 2.05, 2.25, 2.5, 3.0, 3.25, 3.5, 4.0, 4.5)
LATTICE = BUDGETS
"""Those that are planned with lattices, too."""
SAMPLES = 128
TITLES = {"free": "Without data of the user's", "text": "With a text"}
HEAD = "lm_head.weight"


def free_recipes() -> dict[str, Recipe | Budget]:
    """Ours, without a text of the user's."""
    chosen = {name: PRESETS[name] for name in ("quip2-free", "search3", "milo-s1", "int4")}
    chosen["search2"] = with_bits(PRESETS["search3"], 2)
    for bits in (2, 3, 4):
        chosen[f"fine{bits}"] = PRESETS[f"fine{bits}"]
    return named(chosen) | planned_recipes()


def text_recipes() -> dict[str, Recipe | Budget]:
    """Ours, on a text."""
    chosen = {name: PRESETS[name] for name in ("quip2", "gptq3", "gptq4")}
    return named(chosen) | planned_recipes()


def planned_recipes() -> dict[str, Budget]:
    """Each budget, with lattices where they help, and both again rounded by Hessians."""
    planned = {f"--bits {bits}": Budget(bits=bits) for bits in BUDGETS}
    planned |= {f"--bits {b} --lattice": Budget(bits=b, lattice=True) for b in LATTICE}
    return planned | {f"{name} --method gptq": replace(b, method="gptq") for name, b in planned.items()}


class Peers:
    """One model: its matrices, what is important in them, and how others round them. work: a folder for what is made"""

    def __init__(self, model: Path, calibration: Calibration, work: Path) -> None:
        self.model, self.work, self.calibration = model, work / model.name, calibration
        self.source = open_source(str(model))
        self.plan = prepare(self.source, replace(PRESETS["super3"], importance="text"))
        lines = [line for line in self.plan.lines if line.format and line.matrix.role is not Role.HEAD]
        self.body: list[Matrix] = [line.matrix for line in lines]
        self.weights = sum(numel(m.shape) for m in self.body)
        config = text_config(self.source)
        self.shape = Shape(
            layers=config["num_hidden_layers"],
            experts=config.get("num_local_experts") or config.get("n_routed_experts") or 0,
            sharing=config["num_attention_heads"] // config["num_key_value_heads"],
        )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Of the model with our head, fp32."""
        head = pack(self.model, PRESETS["search3"], self.work.parent, frequency=None)
        kept = {name: t.float() for name, t in map_files(self.source).tensors.items()}
        assert all(m.source == m.name for m in self.body), "matrices lie one by one in these checkpoints"
        return kept | {HEAD: decoded(head.path)[HEAD]}

    @cached_property
    def importance(self) -> dict[str, Tensor]:
        """By matrix: mean squares of its inputs on the text, [K] fp32."""
        calibrator = Calibrator(self.source, self.calibration)
        calibrator.build(self.source, [line.matrix for line in self.plan.lines], torch.device("cpu"))
        self.work.mkdir(parents=True, exist_ok=True)
        calibrator.measure(self.plan.lines, jobs=2, workspace=self.work)
        assert calibrator.measured is not None
        return {m.name: calibrator.measured.get(m.name, m.shape[1])[0] for m in self.body}

    def ggml(self, ggml: Ggml, name: str, *, data: bool) -> tuple[PreTrainedModel, float]:
        """The body in one of their types, or in a mix of them, and the bits of a weight there."""

        def rounded(m: Matrix) -> tuple[Tensor, int]:
            columns = self.importance[m.name] if data else None
            return ggml.quantize(read_matrix(self.source, m).float(), self._type(name, m, data=data), columns)

        if data:
            _ = self.importance
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(rounded, self.body))
        return self._built(
            {m.name: w for m, (w, _) in zip(self.body, found, strict=True)}, sum(n for _, n in found)
        )

    def _type(self, name: str, m: Matrix, *, data: bool) -> str:
        mix = name.removeprefix("mix ")
        if mix == name:
            return name
        return type_in_mix(mix, m.projection, m.layer or 0, self.shape, importance=data)

    @cached_property
    def hessians(self) -> Path:
        """A file of what HESSIANS is to `other_quantizers`, on the text."""
        path = self.work / "hessians.safetensors"
        if not path.exists():
            folder = hessians(self.model, self.work.parent, self.calibration)[0].hessians
            assert folder
            store = HessianStore(folder, source=self.source.fingerprint(), calibration=None)
            save_file({m.name: store.get(m.name, m.shape[1])[0].clone() for m in self.body}, path)
        return path

    def package(
        self, python: Path, name: str, bits: int, *, data: bool = False
    ) -> tuple[PreTrainedModel, float]:
        """The body as one of the packages of `other_quantizers` has it, in groups of 64."""
        given, made = self.work / "body.safetensors", self.work / "rounded.safetensors"
        self.work.mkdir(parents=True, exist_ok=True)
        if not given.exists():
            save_file({m.name: read_matrix(self.source, m).float().contiguous() for m in self.body}, given)
        command = [str(python), other_quantizers.__file__, name, str(bits), "64", str(given), str(made)]
        command += [str(self.hessians)] if data else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        sizes = json.loads(made.with_suffix(".json").read_text())
        rounded = {name: t.clone() for name, t in load_file(made).items()}
        made.unlink()
        return self._built(rounded, sum(sizes.values()))

    def _built(self, body: Mapping[str, Tensor], nbytes: int) -> tuple[PreTrainedModel, float]:
        return build(self.tensors | dict(body), self.model), 8 * nbytes / self.weights


def theirs(peers: Peers, args: argparse.Namespace, *, data: bool) -> Iterator[tuple[str, Variant]]:
    """By the name of the row."""
    if args.ggml:
        ggml = Ggml(args.ggml)
        for name in (*TYPES, *(f"mix {mix}" for mix in MIXES)):
            if data or name.startswith("mix ") or not ggml.needs_importance(name):
                yield name, partial(peers.ggml, ggml, name, data=data)
    if args.ik:
        ggml = Ggml(args.ik)
        for name in IK_TYPES:
            if data or not ggml.needs_importance(name):
                yield f"{name} (ik)", partial(peers.ggml, ggml, name, data=data)
    packages = {"HQQ": args.python, "SINQ": args.python}
    if data:
        packages = {"A-SINQ": args.python, "GPTQModel": args.gptqmodel}
    for name, python in packages.items():
        for bits in (2, 3, 4) if python else ():
            own = name.lower().replace("-", "")
            yield f"{name} {bits} bit", partial(peers.package, python, own, bits, data=data)


def measure(model: Path, args: argparse.Namespace) -> dict[str, dict[str, Found]]:
    """By kind (free, text) and name of the row, which is in bold where it is ours."""
    bench = open_bench(model, args.text, context=args.context, tokens=args.tokens)
    calibration = Calibration(
        text=args.calibration, samples=SAMPLES, context=args.context, propagate="original"
    )
    peers, found = Peers(model, calibration, args.work), {}

    def calibrated(recipe: Recipe | Budget, *, data: bool) -> Calibration | None:
        """Budgets have the same column scales, so that they share Hessians."""
        if not isinstance(recipe, Budget):
            return calibration if data else None
        if data:
            return replace(calibration, save=args.work / model.name / "text")
        return Calibration(save=args.work / model.name / "own") if recipe.method == "gptq" else None

    for data in (False,) if args.data is None else (False, True):
        ours = text_recipes() if data else free_recipes()
        variants: dict[str, Variant] = {
            f"**{name}**": packed_variant(bench, recipe, args.work, calibrated(recipe, data=data))
            for name, recipe in ours.items()
        }
        variants |= dict(theirs(peers, args, data=data))
        rows = (data and args.data) or args.recipes
        variants = {n: v for n, v in variants.items() if rows is None or n.strip("*") in rows}
        kind = "text" if data else "free"
        found[kind] = divergences(bench, variants, args.work / model.name / f"peers-{kind}.json")
    return found


def report(found: Mapping[str, Mapping[str, Found]], head: str, earlier: str = "") -> str:
    """A table for each kind, by bits. earlier: a report whose other rows stay, if it has the same head"""
    kinds = read_tables(earlier) if head in earlier else {}
    parts = [head]
    for kind, title in TITLES.items():
        rows = dict(kinds.get(kind, {}))
        for name, row in found.get(kind, {}).items():
            rows[name] = (f"{row.bits:.2f}", f"{row.kl:.4f}")
        by_bits = sorted(((name, *row) for name, row in rows.items()), key=lambda row: float(row[1]))
        if by_bits:
            parts.append(f"{title}:\n\n{table(('recipe or type', 'bits', 'KL'), by_bits)}")
    return "\n\n".join(parts)


def read_tables(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Bits and KL as they stand in a report, by kind and name of the row."""
    found = {}
    for kind, title in TITLES.items():
        _, there, part = text.partition(f"{title}:\n\n")
        if there:
            rows = cells(part.partition("\n\n")[0])[1:]
            found[kind] = {name: (bits, kl) for name, bits, kl in rows}
    return found


def main() -> None:
    """A table for each model."""
    options = parser(__doc__)
    options.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    options.add_argument("--ggml", type=Path, help="llama.cpp's libggml-base.so")
    options.add_argument("--ik", type=Path, help="ik_llama.cpp's libggml.so")
    options.add_argument("--python", type=Path, help="of an environment with hqq and sinq")
    options.add_argument("--gptqmodel", type=Path, help="python of an environment with gptqmodel")
    options.add_argument(
        "--calibration", type=Path, default=TRAINING_TEXT, help="text for those that take one"
    )
    options.add_argument("--data", nargs="*", help="with a text as well, these rows, or those of --recipes")
    options.add_argument("--recipes", nargs="*", help="only these rows")
    add_text(options, tokens=12288)
    add_work(options, "what is found stays here")
    add_page(options, "peers-MODEL")
    args = options.parse_args()
    summary = {}
    for model in args.models:
        found = measure(model, args)
        head = f"`{model.name}`, first {args.tokens:,} tokens of {args.text.name}; KL in nats, ours in bold."
        summary[model.name] = {
            kind: {name: asdict(row) for name, row in rows.items()} for kind, rows in found.items()
        }
        marker = f"peers-{model.name}"
        earlier = fragment(args.page.read_text(encoding="utf-8"), marker) if args.page else ""
        publish(report(found, head, earlier), {"peers": summary}, page=args.page, marker=marker)


if __name__ == "__main__":
    main()
