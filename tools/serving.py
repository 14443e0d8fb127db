"""A server in a process of its own, as its users have it: for tests and tools."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny-moe"
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who is that?') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Server:
    """url: of the server    process: its own."""

    def __init__(self, url: str, process: "subprocess.Popen[str]") -> None:
        """It answers already."""
        self.url, self.process = url, process

    def resident(self) -> int:
        """Bytes of memory that no file backs; 0 where the system does not say."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0
        return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) * 1024


def talking_model(folder: Path) -> Path:
    """The bundled model with a chat template."""
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def model_in_float32(folder: Path) -> Path:
    """The bundled model in float32: in bfloat16 the two best logits are often the same, and rounding decides."""
    shutil.copytree(TINY, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: t.float() for name, t in load_file(weights).items()}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    return folder


@contextmanager
def serving(model: Path, *options: object, threads: int = 1) -> Iterator[Server]:
    """A server on a free port, until the block ends."""
    command = [sys.executable, "-m", "trilobite", "serve", str(model), "--port", "0", *map(str, options)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    )
    assert process.stderr is not None
    try:
        line = ""
        while " at http" not in line:
            line = process.stderr.readline()
            assert line, f"the server ended with {process.wait()}"
        yield Server(line.split(" at ")[1].split(",")[0], process)
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(60)
