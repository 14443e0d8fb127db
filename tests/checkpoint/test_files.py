"""Where small files go: through links, into devices, pipes and streams that are open already."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trilobite.checkpoint.files import write_whole


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, second = tmp_path / "there" / "target", tmp_path / "link", tmp_path / "second"
    link.symlink_to("there/target")
    second.symlink_to(link)
    for data in (b"made", b"changed"):  # a link to nothing at first
        write_whole(second, data, aside=tmp_path)
        assert target.read_bytes() == data
    assert link.is_symlink()
    assert second.is_symlink()
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["target"]


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    data, got = os.urandom(1 << 20), []
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_whole(tmp_path / "pipe", data)
    reader.join(10)
    assert got == [data]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_device_stays(tmp_path: Path) -> None:
    """Run as root, a replaced /dev/full would be a regular file, for all."""
    full = tmp_path / "full"
    try:
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        full.open("wb").close()
    except OSError:
        pytest.skip("only root can make devices")
    with pytest.raises(OSError, match="No space"):
        write_whole(full, b"nothing")
    assert stat.S_ISCHR(full.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "out"])
def test_standard_output_is_written_in_its_order(tmp_path: Path, name: str) -> None:
    """Also where it goes to a file: a new file in its place would take what follows away."""
    script = (
        "import sys; from pathlib import Path; from trilobite.checkpoint.files import write_whole\n"
        "print('first', flush=True); write_whole(Path(sys.argv[1]), b'second\\n'); print('third')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", script, name], cwd=tmp_path, stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\nthird\n"
