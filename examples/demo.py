"""`make demo`: compress the small MoE model that ships with the project and show what each recipe costs.

One table: bytes, bits per weight, perplexity on a held-out text, seconds; then a generated sample of each, and three
sentences by the small translator, compressed to 3 bits.
"""

import shutil
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import trilobite
from trilobite.evaluate.perplexity import Score, score, tokenize_file
from trilobite.runtime.generate.text import Sampling, generate
from trilobite.runtime.load import load_tokenizer
from trilobite.runtime.translate.translator import Translator

HERE = Path(__file__).parent
MODEL, TEXT, OUTPUT = HERE / "tiny-moe", HERE / "heldout.txt", HERE.parent / "demo-output"
RECIPES = ("rtn3", "search3", "milo-s1", "milo-s2")
PROMPT = "The old man looked at the sea and"
CONTEXT, BATCH = 256, 16
TRANSLATOR, TRANSLATOR_RECIPE = HERE / "tiny-translator", "milo-s1"
SENTENCES = (
    "Two dogs are running across a field.",
    "A woman in a red coat is reading a newspaper.",
    "Three children play football on the beach.",
)
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=1)


def main() -> None:
    console = Console()
    console.print(f"Trilobite {trilobite.__version__}: compressing {MODEL.name} with {', '.join(RECIPES)}")
    shutil.rmtree(OUTPUT, ignore_errors=True)
    seconds = {"16 bit": 0.0}
    folders = {"16 bit": MODEL}
    for recipe in RECIPES:
        started = time.monotonic()
        trilobite.compress(str(MODEL), OUTPUT / recipe, trilobite.load_recipe(recipe))
        seconds[recipe] = time.monotonic() - started
        folders[recipe] = OUTPUT / recipe
        console.print(f"  {recipe}: {seconds[recipe]:.1f} s -> {folders[recipe].relative_to(HERE.parent)}")
    tokenizer = load_tokenizer(str(MODEL))
    models = {name: trilobite.load(str(folder)) for name, folder in folders.items()}
    ids = tokenize_file(tokenizer, TEXT)
    with torch.inference_mode():
        scores = score(models, ids, context=CONTEXT, batch=BATCH, reference=models["16 bit"])
        samples = {
            name: generate(model, tokenizer, PROMPT, tokens=40, sampling=SAMPLING).text
            for name, model in models.items()
        }
    console.print(_table(folders, scores, seconds))
    for name, sample in samples.items():
        console.print(f"\n[bold]{name}[/bold]: {PROMPT}[italic]{escape(sample)}[/italic]", highlight=False)
    _translate(console)


def _translate(console: Console) -> None:
    """Three sentences by the compressed translator, with beam search."""
    packed = OUTPUT / f"translator-{TRANSLATOR_RECIPE}"
    trilobite.compress(str(TRANSLATOR), packed, trilobite.load_recipe(TRANSLATOR_RECIPE))
    sizes = [sum(f.stat().st_size for f in at.glob("*.safetensors")) / 1e6 for at in (TRANSLATOR, packed)]
    console.print(
        f"\n[bold]{TRANSLATOR.name}[/bold], {sizes[0]:.1f} MB -> {sizes[1]:.1f} MB by {TRANSLATOR_RECIPE}:"
    )
    translator = Translator(trilobite.load(str(packed)), load_tokenizer(str(packed)), to="de")
    for sentence, made in zip(SENTENCES, translator.translate(SENTENCES), strict=True):
        console.print(f"  {sentence} [italic]{escape(made.texts[0])}[/italic]", highlight=False)


def _table(folders: dict[str, Path], scores: dict[str, Score], seconds: dict[str, float]) -> Table:
    parameters = sum(p.numel() for p in trilobite.load(str(MODEL)).parameters())
    table = Table(title=f"perplexity on {TEXT.name}, context {CONTEXT}")
    for column in ("recipe", "MB", "bits/weight", "perplexity", "KL", "top-1", "seconds"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for name, folder in folders.items():
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        s = scores[name]
        table.add_row(
            name,
            f"{size / 1e6:.2f}",
            f"{size * 8 / parameters:.2f}",
            f"{s.perplexity:.2f}",
            f"{s.kl:.4f}",
            f"{s.top1:.3f}",
            f"{seconds[name]:.1f}" if name != "16 bit" else "",
        )
    return table


if __name__ == "__main__":
    main()
