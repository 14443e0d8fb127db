"""serve: a model for many, through HTTP."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilobite.cli.console import note, quiet
from trilobite.cli.memory import GpuMemoryOption, MemoryOption, load_within, place_of
from trilobite.cli.options import ActivationsOption, DeviceOption, usable_device
from trilobite.cli.run import ModelArgument
from trilobite.errors import MissingExtraError

if TYPE_CHECKING:
    import socket

    from trilobite.serve.settings import Settings


def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option(help="Where to listen; others than this machine want an --api-key.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="0 = any that is free.", min=0, max=65535, metavar="N")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="What clients have to know.", envvar="TRILOBITE_API_KEY", metavar="KEY"
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Texts at a time.", min=1, max=256, metavar="N")] = 8,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a text, prompt and answer (4096, or fewer by the model).", min=2, metavar="N"
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option(help="Requests that may wait for a slot; more get status 429.", min=0, metavar="N")
    ] = 64,
    seconds: Annotated[float, typer.Option(help="Longest time of a request.", min=1, metavar="S")] = 600.0,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may ask, such as https://example.org; repeatable.", metavar="URL"
        ),
    ] = None,
    device: DeviceOption = "auto",
    activations: ActivationsOption = "exact",
    memory: MemoryOption = "auto",
    gpu_memory: GpuMemoryOption = None,
) -> None:
    """Serve a model: OpenAI's API, and a page to chat in at /.

    Texts run side by side in --slots. Ctrl-C or SIGTERM lets running answers finish.

    \b
    Example: trilobite serve mixtral-3bit --slots 4 --context 8192
    """
    _check_extra()
    from trilobite.runtime.load import load_tokenizer
    from trilobite.serve.pages import make_pages
    from trilobite.serve.server import listen
    from trilobite.serve.server import serve as run
    from trilobite.serve.settings import Settings

    settings = Settings(
        host=host, port=port, api_key=api_key, queue=queue, seconds=seconds, origins=tuple(cors or ())
    )
    listening = listen(settings)  # before the model is loaded: that takes longer
    with quiet():
        place = usable_device(place_of(device, memory, gpu_memory))
        loaded = load_within(
            model,
            memory,
            gpu_memory=gpu_memory,
            device=place,
            activations=activations,
            context=context,
            texts=slots,
        )
        tokenizer = load_tokenizer(model)
        pages = make_pages(loaded, slots, context)
        name = Path(str(loaded.name_or_path)).resolve().name
        said = f"{name} at {_address(settings, listening)}, {slots} texts of {pages.context} tokens at a time"
        run(
            loaded,
            tokenizer,
            pages,
            settings,
            listening,
            _about(Path(loaded.name_or_path)),
            lambda: note(said),
        )
    note("ended")


def _address(settings: "Settings", listening: "socket.socket") -> str:
    """As a browser takes it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


def _about(folder: Path) -> dict[str, Any]:
    """Bits per weight of a packed checkpoint, with every byte on disk; nothing of an original."""
    from trilobite.checkpoint.packed import REPORT, read_report
    from trilobite.checkpoint.summary import bytes_on_disk
    from trilobite.quantize.plan.report import report

    if not (folder / REPORT).exists():
        return {}
    found = report(read_report(folder)["tensors"], bytes_on_disk=bytes_on_disk(folder))
    return {"bits_per_weight": round(found.bits_per_weight, 3)}


def _check_extra() -> None:
    """Raise MissingExtraError where what a server needs is not installed."""
    from importlib.util import find_spec

    missing = [
        name for name in ("fastapi", "uvicorn", "openai", "prometheus_client") if find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(f"serve needs {', '.join(missing)}: pip install 'trilobite[serve]'")
