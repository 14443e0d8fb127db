"""eval, stats: what compression cost, and which experts a text uses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.checkpoint.evaluation import check_destination
from trilobite.cli.console import Progress, note, number, print_json, print_table, quiet
from trilobite.cli.memory import GpuMemoryOption, MemoryOption, load_within, place_of
from trilobite.cli.options import (
    ActivationsOption,
    DeviceOption,
    JsonOption,
    TargetTextOption,
    WindowOption,
    check_output,
    usable_device,
)
from trilobite.cli.run import ModelArgument
from trilobite.cli.threads import wait_briefly
from trilobite.cli.translate import BeamsOption, FromOption, ToOption
from trilobite.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trilobite.evaluate.forced import ForcedScore
    from trilobite.evaluate.perplexity import Score
    from trilobite.evaluate.translation import TranslationScore
    from trilobite.runtime.translate.translator import Translator

TextOption = Annotated[Path | None, typer.Option("--text", help="A UTF-8 text file.", metavar="FILE")]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", help="Windows in a forward pass; default: what fits.", min=1, metavar="N"),
]
RowsOption = Annotated[
    bool, typer.Option("--rows", help="Join the lines of --text as OPTQ does WikiText's: by empty ones.")
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        help="The original: also measure the KL divergence to it and top-1 agreement.", metavar="ORIGINAL"
    ),
]
TasksOption = Annotated[
    str | None, typer.Option(help="Benchmarks, separated by commas, for example piqa,mmlu.", metavar="A,B")
]
TranslationOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        help="Two UTF-8 files, line by line: sentences, and what they are in the other language.",
        metavar="SOURCE TARGET",
    ),
]
DataOption = Annotated[
    Path | None, typer.Option(help="Folder of the task files; without it they are downloaded.", metavar="DIR")
]


def evaluate(
    model: ModelArgument,
    text: TextOption = None,
    context: WindowOption = None,
    batch: BatchOption = None,
    rows: RowsOption = False,
    reference: ReferenceOption = None,
    tasks: TasksOption = None,
    data: DataOption = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first N items of each task, or sentences.", min=1, metavar="N"),
    ] = None,
    translation: TranslationOption = None,
    to: ToOption = None,
    source: FromOption = None,
    beams: BeamsOption = 5,
    device: DeviceOption = "auto",
    activations: ActivationsOption = "exact",
    memory: MemoryOption = "auto",
    gpu_memory: GpuMemoryOption = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result beside the model, for its card and `report`.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure a model on a text, on benchmark tasks, or by its translations.

    Perplexity is OPTQ's: the whole text in windows without overlap. --reference also measures the distance to
    the original model, which shows small losses that perplexity hides. Translations are measured by BLEU and chrF,
    with --reference also by the KL divergence to the original on the given translations, word by word.

    \b
    Example: trilobite eval mixtral-3bit --text wiki.test.txt --reference mistralai/Mixtral-8x7B-v0.1
    Example: trilobite eval nllb-moe-3bit --translation test.en test.de --to de --reference facebook/nllb-moe-54b
    """
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if text is None and not names and translation is None:
        raise typer.BadParameter("give --text FILE, --tasks A,B, or --translation SOURCE TARGET")
    if reference and text is None and translation is None:
        raise typer.BadParameter("--reference goes with --text and --translation")
    if not names and (data or (limit and translation is None)):
        raise typer.BadParameter(f"--{'data' if data else 'limit'} goes with --tasks")
    if rows and text is None:
        raise typer.BadParameter("--rows goes with --text")
    if save:
        check_destination(Path(model))
    if translation is None and (to or source):
        raise typer.BadParameter(f"--{'to' if to else 'from'} goes with --translation")
    if translation:
        wait_briefly()
    from trilobite import load
    from trilobite.evaluate.measure import default_context, fitting_batch, score_file
    from trilobite.evaluate.tasks import deviations, load_tasks, run_tasks
    from trilobite.runtime.load import load_tokenizer
    from trilobite.runtime.translate.translator import Search, Translator

    found: dict[str, Any] = {"model": model}
    with quiet():
        on = usable_device(place_of(device, memory, gpu_memory))
        ready = load_tasks(names, data=data) if names else {}
        pairs = _pairs(translation, limit) if translation else None
        loaded = load_within(model, memory, gpu_memory=gpu_memory, device=on, activations=activations)
        tokenizer = load_tokenizer(model)
        original = load(reference, device=on) if reference else None
        if pairs is not None:
            search = Search(beams=beams, batch=batch or Search.batch)
            by = [
                Translator(m, tokenizer, to=to, source=source, search=search) for m in (loaded, original) if m
            ]
            files = [path.name for path in translation or ()]
            found["translation"] = {"files": files} | _score_translations(by, pairs)
        context = context or default_context(2048, *filter(None, (loaded, original)))
        if text is not None:
            with Progress() as bars:
                sizes: Any = {"context": context, "batch": batch, "rows": rows}
                sizes["progress"] = bars.step("windows")
                score = score_file(loaded, tokenizer, text, reference=original, **sizes)
            found |= {"text": str(text)} | ({"rows": True} if rows else {}) | _plain(score)
        if names:
            batch = batch or fitting_batch(loaded, context)
            if differs := deviations(ready):
                found["differs"] = differs
            found["tasks"] = run_tasks(loaded, tokenizer, ready, limit=limit, batch=batch)
    _print_found(found, json)
    if save:
        how = {"activations": activations, "device": on, "limit": limit, "reference": reference}
        _keep(Path(model), found, {key: value for key, value in how.items() if value is not None})


def _keep(folder: Path, found: dict[str, Any], how: dict[str, Any]) -> None:
    """Beside the model, by the names of files without their folders; in its card, where no person changed that."""
    from trilobite import __version__
    from trilobite.checkpoint.evaluation import EVALUATION, save_evaluation, with_evaluation
    from trilobite.checkpoint.packed import read_report
    from trilobite.checkpoint.source import open_source
    from trilobite.checkpoint.summary import is_packed
    from trilobite.quantize.run.card import CARD, update_card
    from trilobite.quantize.run.metadata import source_name

    entry = {key: value for key, value in found.items() if key != "model"} | how
    if "text" in entry:
        entry["text"] = Path(entry["text"]).name
    if reference := entry.get("reference"):
        entry["reference"] = source_name(reference, Path(reference))
    entry["trilobite"] = __version__
    if is_packed(folder):
        config, measured = open_source(str(folder)).config, with_evaluation(folder, entry)
        if not update_card(folder, read_report(folder), config, measured):
            note(f"{folder / CARD} is not as trilobite wrote it, and stays as it is")
    save_evaluation(folder, entry)  # last: it says that all of it is there
    note(f"kept in {folder / EVALUATION}")


def _print_found(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
        return
    if "text" in found:
        _print_score(found)
    if "translation" in found:
        _print_translation(found["model"], found["translation"])
    if "tasks" in found:
        _print_tasks(found["tasks"])
        for name, text in found.get("differs", {}).items():
            print(f"{name} is not lm_eval's: {text}")


def _pairs(files: tuple[Path, Path], limit: int | None) -> tuple[list[str], list[str]]:
    """Sentences and references, as many as asked for; what is missing shows before a model is loaded."""
    from trilobite.evaluate.translation import check_scorer
    from trilobite.models.pairs import read_parallel

    check_scorer()
    sources, references = read_parallel(*files, EvaluationError)
    return sources[:limit], references[:limit]


def _score_translations(
    translators: "Sequence[Translator]", pairs: tuple[list[str], list[str]]
) -> dict[str, Any]:
    """Of the model, and with a reference also of that one. translators: the model's, and perhaps the original's."""
    from trilobite.evaluate.translation import score_forced, score_translations

    scores, first = [], translators[0]
    found: dict[str, Any] = {"beams": first.search.beams}
    with Progress() as bars:
        for name, translator in zip(("sentences", "sentences, reference"), translators, strict=False):
            scores.append(score_translations(translator, *pairs, progress=bars.step(name)))
        found |= _plain(scores[0])
        for original, translator in zip(scores[1:], translators[1:], strict=True):
            found |= {"reference_bleu": original.bleu, "reference_chrf": original.chrf}
            forced = score_forced(first, *pairs, translator.model, progress=bars.step("references"))
            found |= {key: value for key, value in _plain(forced).items() if key not in found}
    return found


def _plain(score: "Score | TranslationScore | ForcedScore") -> dict[str, Any]:
    from dataclasses import asdict

    return {key: value for key, value in asdict(score).items() if value is not None}


def _print_score(found: dict[str, Any]) -> None:
    rows = [("perplexity", number(found["perplexity"]))]
    if "kl" in found:
        rows.append(("perplexity of the reference", number(found["reference_perplexity"])))
        rows.append(("KL divergence to the reference, nats", number(found["kl"], 5)))
        rows.append(("top-1 agreement with the reference", number(found["top1"])))
    rows.append(("tokens predicted", str(found["tokens"])))
    rows.append(("seconds", number(found["seconds"], 1)))
    how = ", lines joined as OPTQ does" if found.get("rows") else ""
    title = (
        f"{found['model']} on {found['text']}{how}, {found['windows']} windows of {found['context']} tokens"
    )
    print_table(("", ""), rows, title=title)


def _print_translation(model: str, found: dict[str, Any]) -> None:
    columns = ["", "BLEU", "chrF"]
    rows = [[model, number(found["bleu"], 2), number(found["chrf"], 2)]]
    if "reference_bleu" in found:
        pairs = [(found[name], found[f"reference_{name}"]) for name in ("bleu", "chrf")]
        rows.append(["reference", *(number(theirs, 2) for _, theirs in pairs)])
        rows.append(["difference", *(f"{ours - theirs:+.2f}" for ours, theirs in pairs)])
    speed = found["sentences"] / max(found["seconds"], 1e-9)
    title = f"{' -> '.join(found['files'])}, {found['sentences']} sentences, beams {found['beams']}"
    print_table(columns, rows, title=f"{title}, {speed:.1f} sentences/s")
    if "kl" in found:
        distance = [
            ("KL divergence to the reference, nats", number(found["kl"], 5)),
            ("top-1 agreement with the reference", number(found["top1"])),
            ("perplexity", number(found["perplexity"])),
            ("perplexity of the reference", number(found["reference_perplexity"])),
        ]
        print_table(("given translations, word by word", ""), distance)


def _print_tasks(tasks: dict[str, dict[str, float]]) -> None:
    rows = [
        (name, metric, number(value), number(results.get(f"{metric}_stderr")), str(int(results["n"])))
        for name, results in tasks.items()
        for metric, value in results.items()
        if metric != "n" and "stderr" not in metric
    ]
    print_table(("task", "metric", "value", "+-", "items"), rows, left=2)


def stats(
    model: ModelArgument,
    text: Annotated[
        Path, typer.Option("--text", help="A UTF-8 text file to run through the model.", metavar="FILE")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to write the frequencies (JSON).", metavar="FILE")
    ] = Path("stats.json"),
    target: TargetTextOption = None,
    context: WindowOption = None,
    samples: Annotated[
        int | None, typer.Option(help="Only the first N windows, or pairs of lines.", min=1, metavar="N")
    ] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Count how often a text uses each expert.

    Recipes with a frequency-r rank need the file that this writes. An encoder-decoder reads pairs: --text has
    the sentences, --target-text their translations, line by line.

    \b
    Example: trilobite stats deepseek-ai/deepseek-moe-16b-base --text sample.txt -o stats.json
    """
    check_output(output, text, target)
    from trilobite import load
    from trilobite.evaluate.frequency import save_frequency
    from trilobite.evaluate.measure import count_experts, count_experts_of_pairs, default_context
    from trilobite.runtime.load import load_tokenizer

    with quiet():
        loaded, tokenizer = load(model, device=usable_device(device)), load_tokenizer(model)
        with Progress() as bars:
            how: Any = {"samples": samples, "progress": bars.step("pairs" if target else "windows")}
            if target is not None:
                counts, tokens = count_experts_of_pairs(loaded, tokenizer, text, target, **how)
            else:
                context = context or default_context(512, loaded)
                counts, tokens = count_experts(loaded, tokenizer, text, context=context, **how)
    save_frequency(output, counts, model_name=model, text=text.name, tokens=tokens)
    if json:
        print_json({"output": str(output), "tokens": tokens, "layers": counts})
        return
    _print_counts(counts, tokens)
    print(f"written to {output}")


def _print_counts(counts: dict[str, list[int]], tokens: int) -> None:
    rows = [
        (layer, str(len(c)), _share(c, min(c)), _share(c, max(c)), str(c.count(0)))
        for layer, c in counts.items()
    ]
    columns = ("layer", "experts", "least used", "most used", "never used")
    print_table(columns, rows, title=f"shares of the experts chosen for {tokens} tokens")


def _share(counts: list[int], one: int) -> str:
    return f"{100 * one / max(1, sum(counts)):.2f} % (expert {counts.index(one)})"
