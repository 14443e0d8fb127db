"""Every command on a tiny random Mixtral, as a user would call it; every mistake is one line and a status."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.commands import TEXT, Run
from support.paths import ROOT
from tokenizers import Tokenizer, models
from transformers import MixtralForCausalLM, PreTrainedTokenizerFast

import trilobite
from trilobite.checkpoint.source import open_source
from trilobite.cli import console
from trilobite.cli import run as cli_run
from trilobite.errors import PromptError
from trilobite.kernels.cpu import engine as cpu
from trilobite.recipe import PRESETS, load_recipe
from trilobite.runtime.generate.cache import GrowingCache
from trilobite.runtime.generate.chat import Chat
from trilobite.runtime.generate.streamer import Streamer
from trilobite.runtime.load import load_tokenizer
from trilobite.runtime.offload import plan as planning

# Making.


def test_compress_counts_every_byte(run: Run, original: Path, tmp_path: Path) -> None:
    done = run("compress", original, tmp_path / "out", "--recipe", "milo-s1", "--json").json
    on_disk = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert done["bytes_on_disk"] == on_disk
    assert done["bits_per_weight"] == pytest.approx(on_disk * 8 / done["parameters"], rel=1e-4)
    assert done["roles"]["expert"]["tensors"] == 24
    assert 0 < done["roles"]["expert"]["error"] < 0.5
    assert done["roles"]["attention"]["rank"]["mean"] > 0
    assert {row["role"] for row in done["kept"]} == {"embedding", "router", "norm"}
    assert done["seconds"] > 0
    assert len(done["slowest"]) == 5


def test_compress_prints_tables_without_control_characters(run: Run, original: Path, tmp_path: Path) -> None:
    first = run("compress", original, tmp_path / "out", "-r", "rtn3", "--jobs", 1, "--device", "cpu")
    assert first.status == 0, first.err
    assert "\x1b" not in first.out + first.err
    assert "\r" not in first.out + first.err
    for expected in (
        "other files",
        "total",
        "slowest tensors",
        "embedding stays in 16 bit",
        "bits per weight",
    ):
        assert expected in first.out
    again = run("compress", original, tmp_path / "out", "-r", "rtn3")
    assert again.status == 0
    assert "already complete" in again.err
    other = run("compress", original, tmp_path / "out", "-r", "search3")
    assert other.status == 1
    assert "differs in its recipe" in other.err


def test_plan_prints_and_writes_nothing(run: Run, original: Path) -> None:
    before = sorted(original.parent.iterdir())
    shown = run("plan", original, "-r", "milo-s1", "--tensors")
    assert "block_sparse_moe.experts.3.w2.weight" in shown.out
    assert "Nothing was written" in shown.out
    data = run("plan", original, "-r", "milo-s1", "--json").json
    assert len(data["tensors"]) == 41
    assert sorted(original.parent.iterdir()) == before


def test_options_change_the_recipe(run: Run, original: Path) -> None:
    options = ["--group-size", 32, "--method", "hqq", "--rank", "dense-2", "--compensator", "int8"]
    data = run(
        "plan",
        original,
        "-r",
        "rtn3",
        *options,
        "--iterations",
        3,
        "--columns",
        "sinkhorn",
        "--importance",
        "text",
        "--keep",
        "head",
        "--keep",
        "expert",
        "--json",
    ).json
    assert data["recipe"]["name"] == "rtn3+rank+compensator+iterations+columns+importance+method+group+keep"
    assert (data["recipe"]["iterations"], data["recipe"]["columns"]) == (3, "sinkhorn")
    assert data["recipe"]["importance"] == "text"
    rows = {row["name"]: row for row in data["tensors"]}
    attention = rows["model.layers.0.self_attn.q_proj.weight"]
    assert (attention["format"], attention["method"], attention["rank"]) == ("int3-g32", "hqq", 2)
    assert (attention["compensator"], attention["columns"]) == ("int8", "sinkhorn")
    assert rows["lm_head.weight"]["kept"] == "kept by the recipe"
    assert {row["kept"] for row in data["tensors"] if row["role"] == "expert"} == {"kept by the recipe"}


def test_recipes_prints_files_that_can_be_read_back(run: Run, tmp_path: Path) -> None:
    listed = run("recipes")
    assert all(f"{name} " in listed.out for name in PRESETS)
    assert run("recipes", "--json").json.keys() == PRESETS.keys()
    file = tmp_path / "mine.yaml"
    file.write_text(run("recipes", "milo-s2").out)
    assert load_recipe(str(file)) == PRESETS["milo-s2"]


# Looking.


def test_inspect_original(run: Run, original: Path) -> None:
    data = run("inspect", original, "--samples", 2, "--json").json
    assert data["kind"] == "original"
    assert data["model_type"] == "mixtral"
    sample = data["roles"]["expert"]["sample"]
    assert sample["matrices"] == 2
    assert abs(sample["kurtosis"]) < 0.5  # random normal weights
    assert 0 < sample["share"] < 1
    assert data["roles"]["embedding"]["dtypes"] == {"BF16": 1}
    assert data["tensor_bytes"] == 2 * data["parameters"]
    assert "residual rank" in run("inspect", original, "--all").out


def test_inspect_packed(run: Run, packed: Path) -> None:
    data = run("inspect", packed, "--json").json
    assert data["kind"] == "packed"
    assert data["recipe"] == "rtn3"
    assert data["bytes_on_disk"] == sum(p.stat().st_size for p in packed.iterdir())
    assert data["roles"]["head"]["formats"] == {"int8-g64": 1}
    assert "int3-g64, int3-g32" in run("inspect", packed).out


def test_doctor(run: Run) -> None:
    data = run("doctor", "--json").json
    assert data["versions"]["torch"] == torch.__version__
    assert data["read_bandwidth"]["GB_per_s"] > 0
    assert data["kernels"]["backend"]
    assert "kernels" in run("doctor").out


def test_version(run: Run) -> None:
    assert run("version").out == run("--version").out == f"trilobite {trilobite.__version__}\n"


# Running.


def test_generate_is_greedy_and_repeatable(run: Run, packed: Path) -> None:
    first = run("generate", packed, "the sea", "-n", 8, "--json").json
    assert first["tokens"] <= 8
    assert first["prompt_tokens"] == 7
    streamed = run("generate", packed, "the sea", "-n", 8)
    assert streamed.out == f"the sea{first['text']}\n"
    assert "tokens/s" in streamed.err


@pytest.mark.skipif(not cpu.available(), reason="the native CPU engine is not built here")
def test_activations_are_chosen_explicitly(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    run_linear = cpu.run_linear
    monkeypatch.setattr(cpu, "run_linear", lambda *args: used.append(args[5]) or run_linear(*args))
    for mode in ((), ("--activations", "int8")):
        assert run("generate", packed, "the sea", "-n", 4, *mode).status == 0
    assert used[0] == cpu.DIGITS["exact"]
    assert used[-1] == cpu.DIGITS["int8"]
    assert run("generate", packed, "the sea", "--activations", "int9").status == 2
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert "needs the native CPU engine" in run("generate", packed, "x", "--activations", "int8").err


def test_generate_with_a_seed(run: Run, packed: Path) -> None:
    sampled = ("generate", packed, "the sea", "-n", 12, "--temperature", 5, "--json", "--seed")
    texts = [run(*sampled, seed).json["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_compiled_step_is_for_gpus(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", packed, "the sea", "-n", 8)
    refused = run(*command, "--compile")
    assert refused.status == 2
    assert "--device cuda" in refused.err
    plain = run(*command).out
    monkeypatch.setattr(cli_run, "place", lambda device, compiled, gpu_memory: "cpu")
    fixed = run(*command, "--compile")
    assert fixed.out == plain
    assert "waits for the compiler" in fixed.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sea\nthe sea\n"))
    assert run("chat", packed, "-n", 8, "--compile").err.count("tokens/s") == 2


def test_a_text_too_long_for_the_gpu_is_one_line(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(MixtralForCausalLM, "generate", no_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**7, 10**9))
    failed = run("generate", packed, "the sea", "-n", 8)
    assert failed.status == 1
    assert failed.err.startswith("error: a text of up to 15 tokens does not fit beside the model: 0.03 GB")
    assert failed.err.count("\n") == 1


def test_generate_stops_where_the_context_ends(run: Run, original: Path) -> None:
    made = run("generate", original, "x" * 250, "-n", 64, "--temperature", 5, "--seed", 1, "--json").json
    assert made["stop"] in ("context", "end")
    assert made["tokens"] <= 6


def test_chat_takes_piped_input(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("the sea\n/reset\n\nthe sea\n" + "x" * 300 + "\n/quit\nno\n")
    )
    talked = run("chat", packed, "-n", 8)
    assert talked.status == 0
    assert "no chat template" in talked.err
    assert "forgotten" in talked.err
    assert talked.err.count("tokens/s") == 2
    assert "the model was made for 256" in talked.err
    half = len(talked.out) // 2
    assert talked.out[:half] == talked.out[half:]  # after /reset the same question has the same answer


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['content'] }};{% endfor %}a"])
def test_chat_remembers_what_it_has_read(packed: Path, template: str | None) -> None:
    tokenizer, model = load_tokenizer(str(packed)), trilobite.load(str(packed), dtype=torch.float32)
    tokenizer.chat_template = template
    chat, forgetful = Chat(model, tokenizer), Chat(model, tokenizer)
    remembered = []
    for message in ("the sea", "and then", "the old man"):
        answer = chat.ask(message, tokens=6)
        forgetful.cache = GrowingCache(model)
        again = forgetful.ask(message, tokens=6)
        assert answer.text == again.text
        assert answer.prompt_tokens == again.prompt_tokens
        assert again.remembered == 0
        remembered.append(answer.remembered)
    assert 0 == remembered[0] < remembered[1] < remembered[2]


def test_chat_forgets_half_of_a_full_context(packed: Path) -> None:
    """So that the turns after it find their beginning in the cache."""
    chat = Chat(trilobite.load(str(packed)), load_tokenizer(str(packed)))
    turns = [chat.ask(letter * 40, tokens=4) for letter in "abcdefghijkl"]
    lengths = [t.prompt_tokens for t in turns]
    assert max(lengths) <= 252
    anew = [i for i, t in enumerate(turns) if t.remembered == 0]
    assert anew[0] == 0
    assert 2 <= len(anew) <= 4
    assert all(lengths[i] <= 126 for i in anew)


def test_chat_with_a_template_forgets_the_oldest_turns(packed: Path) -> None:
    tokenizer = load_tokenizer(str(packed))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}a"
    chat = Chat(trilobite.load(str(packed)), tokenizer)
    assert chat.ask("first", tokens=4).prompt_tokens == len("ufirst;a")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    for i in range(6):
        assert chat.ask(f"{i}" * 80, tokens=4).prompt_tokens <= 252
    assert chat.messages[0]["content"] == "4" * 80
    with pytest.raises(PromptError, match="make it shorter"):
        chat.ask("x" * 300, tokens=4)
    assert chat.messages[-2]["content"] == "5" * 80


def test_generate_reads_standard_input(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sea\n"))
    assert run("generate", packed, "-", "-n", 8).out == run("generate", packed, "the sea", "-n", 8).out


def test_stop_strings_end_the_text_before_them(run: Run) -> None:
    """Also in the middle of a token, and where only half of a longer one comes."""
    command = ("generate", ROOT / "examples" / "tiny-moe", "The sea", "-n", 12, "--device", "cpu")
    whole = run(*command, "--json").json["text"]
    stop = whole[5:8]
    made = run(*command, "--stop", stop, "--stop", whole[9:] + "never", "--json").json
    assert made["text"] == whole[: whole.index(stop)]
    assert made["stop"] == "stop"
    assert made["tokens"] < 12
    assert run(*command, "--stop", stop).out == f"The sea{made['text']}\n"


def test_a_beginning_of_a_stop_string_is_held_back() -> None:
    pieces: list[str] = []
    streamer = Streamer(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), pieces.append, ("END",)
    )
    for text in ("a E", "N", "x EN", "D b"):
        streamer.on_finalized_text(text)
    assert pieces == ["a ", "ENx "]
    assert streamer.stopped


def test_what_chooses_the_token(run: Run, packed: Path) -> None:
    hot = ("generate", packed, "the sea", "-n", 12, "--temperature", 5, "--seed", 1, "--json")
    greedy = run("generate", packed, "the sea", "-n", 12, "--json").json["text"]
    assert run(*hot, "--top-k", 1).json["text"] == greedy != run(*hot).json["text"]
    punished = run("generate", packed, "the sea", "-n", 12, "--repetition-penalty", 50, "--json").json["text"]
    assert len(set(punished)) > len(set(greedy)) or punished != greedy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "1e-45"), "temperature 1e-45: expected 0"),
        (("--repetition-penalty", "0"), "repetition penalty 0.0"),
        (("--stop", ""), "an empty stop string"),
    ],
)
def test_what_no_distribution_has_is_one_line(
    run: Run, packed: Path, words: tuple[str, ...], message: str
) -> None:
    failed = run("generate", packed, "the sea", *words)
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert message in failed.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("garbage", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"eos_token_id": "abc"}', "eos_token_id is 'abc'"),
        ('{"output_hidden_states": [[]]}', "output_hidden_states is [[]]"),
        ('{"repetition_penalty": -1}', "strictly positive"),
        ('{"num_beams": 4, "num_return_sequences": 3}', None),
    ],
)
def test_a_generation_config_never_gives_a_traceback(
    run: Run, packed: Path, tmp_path: Path, content: str, message: str | None
) -> None:
    shutil.copytree(packed, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(content)
    done = run("generate", tmp_path / "m", "the sea", "-n", 4)
    if message is None:  # what the command line says holds
        assert done.status == 0
        return
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert "generation_config.json" in done.err
    assert message in done.err


def test_text_that_is_none_is_one_line(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run("generate", packed, "the \udcff sea")
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert "from character 5 on" in failed.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udcff\nthe sea\n"))
    talked = run("chat", packed, "-n", 4)
    assert talked.status == 0
    assert "error: the prompt is not text" in talked.err
    assert talked.err.count("tokens/s") == 1


def test_a_chat_template_that_fails_is_one_line(
    run: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(packed, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sea\n"))
    talked = run("chat", tmp_path / "m", "-n", 4)
    assert "error: the chat template of this checkpoint fails: TemplateError: no system role" in talked.err


@pytest.mark.parametrize("name", ["MODEL", "SRC", "PATH"])
def test_an_empty_model_is_wrong_usage(run: Run, name: str) -> None:
    command = {"MODEL": ("generate", "", "x"), "SRC": ("plan", "", "-r", "rtn3"), "PATH": ("inspect", "")}
    refused = run(*command[name])
    assert refused.status == 2
    assert name in refused.err


@pytest.fixture(scope="module")
def damaged(packed: Path) -> Path:
    """NaN in the norm before the second layer's experts."""
    path = packed.parent / "damaged"
    shutil.copytree(packed, path)
    name = "model.layers.1.post_attention_layernorm.weight"
    (file,) = (f for f in path.glob("*.safetensors") if name in load_file(f))
    info = open_source(str(path)).tensors[name]
    with info.file.open("r+b") as handle:
        handle.seek(info.offset)
        handle.write(b"\xff\x7f" * (info.nbytes // 2))
    assert file == info.file
    return path


def test_nan_logits_are_said_with_where_they_begin(
    run: Run, damaged: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the sea\n"))
    for command in (
        ("generate", damaged, "the sea"),
        ("generate", damaged, "the sea", "--temperature", 1),
        ("eval", damaged, "--text", text, "--context", 64),
        ("stats", damaged, "--text", text, "--context", 64, "-o", tmp_path / "s.json"),
        ("trace", damaged, "--text", text, "--context", 64, "-o", tmp_path / "t.npz"),
        ("chat", damaged),
    ):
        failed = run(*command)
        assert "begins in model.layers.1.post_attention_layernorm;" in failed.err, command
        assert failed.status == 1
    assert not (tmp_path / "s.json").exists()


# Measuring.


def test_the_default_context_is_the_models_own(run: Run, packed: Path, text: Path, tmp_path: Path) -> None:
    data = run("eval", packed, "--text", text, "--json").json
    assert (data["context"], data["windows"]) == (256, len(TEXT) // 256)
    assert run("stats", packed, "--text", text, "-o", tmp_path / "s.json", "--json").json["tokens"] % 256 == 0


def test_a_narrow_terminal_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("a role of some length", "123456789", "987654321", "555555555"), ("total", "1", "", "2")]
    monkeypatch.setattr(console, "WIDTH", 40)
    console.print_table(("role", "tensors", "params", "bytes"), rows)
    printed = capsys.readouterr().out
    assert "tensors 123456789\n" in printed
    assert max(map(len, printed.splitlines())) <= 40
    monkeypatch.setattr(console, "WIDTH", 60)
    console.print_table(("role", "tensors", "params", "bytes"), rows)
    assert "123456789" in capsys.readouterr().out.splitlines()[2]


def test_eval_with_reference(run: Run, original: Path, packed: Path, text: Path) -> None:
    command = ("eval", packed, "--text", text, "--context", 64, "--reference", original)
    data = run(*command, "--batch", 4, "--json").json
    assert data["kl"] > 0
    assert 0 < data["top1"] <= 1
    assert data["perplexity"] > 1
    assert data["windows"] == len(TEXT) // 64
    assert "KL divergence" in run(*command).out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--reference", "x", "--tasks", "piqa"), "--reference goes with --text"),
        (("--text", "x", "--data", "x"), "--data goes with --tasks"),
        (("--tasks", "piqa", "--rows"), "--rows goes with --text"),
        (("--text", "x", "--limit", 2), "--limit goes with --tasks"),
    ],
)
def test_eval_ignores_no_option(run: Run, packed: Path, options: tuple[object, ...], message: str) -> None:
    refused = run("eval", packed, *options)
    assert refused.status == 2
    assert message in refused.err


def test_stats_feed_a_frequency_policy(run: Run, original: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    shown = run("stats", original, "--text", text, "-o", file, "--context", 64, "--samples", 3)
    assert "192 tokens" in shown.out
    data = run("stats", original, "--text", text, "-o", file, "--context", 64, "--json").json
    assert data["layers"].keys() == {"0", "1"}
    options = ("-r", "rtn3", "--rank", "frequency-4", "--json", "--stats", file)
    ranks = [r["rank"] for r in run("plan", original, *options).json["tensors"] if r["role"] == "expert"]
    assert sum(ranks) > 0


def test_a_bound_on_the_memory_of_a_gpu(run: Run, packed: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for command in ("generate {} sea", "chat {}", "eval {} --text {}"):
        refused = run(*command.format(packed, packed / "config.json").split(), "--gpu-memory", "10GiB")
        assert refused.status == 1
        assert "no GPU" in refused.err
        assert len(refused.err.strip().splitlines()) == 1
    for option in ("--device=cpu", "--compile"):
        assert run("generate", packed, "sea", "--gpu-memory", "10GiB", option).status == 2


def test_a_bound_on_memory(run: Run, packed: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "anonymous_bytes", lambda: 0)
    free = run("generate", packed, "the sea", "-n", 5, "--json").json
    assert "hit_ratio" not in free
    refused = run("generate", packed, "the sea", "--memory", "1MB")
    assert refused.status == 1
    assert "smallest that works" in refused.err
    assert "such as 8GiB" in run("chat", packed, "--memory", "plenty").err
    monkeypatch.setattr(planning, "ENGINE_BYTES", 0)
    figure = refused_figure(run("generate", packed, "the sea", "--memory", "100").err)
    bound = run("generate", packed, "the sea", "-n", 5, "--json", "--memory", figure, "-v")
    assert bound.json["text"] == free["text"]
    assert "memory " in bound.err
    # Nobody asks, and the model does not fit: it streams all the same, and says what to expect.
    half = planning.Offload(memory=2**40, slots=4)
    monkeypatch.setattr("trilobite.runtime.offload.streaming.settings_of", lambda *args: half)
    for command in (
        ["generate", packed, "the sea", "-n", 5],
        ["eval", packed, "--text", text, "--context", 64],
    ):
        alone = run(*command)
        assert alone.status == 0
        assert re.search(r"does not fit into free memory: .*B/s allow about [0-9.]+ tokens/s", alone.err)


def refused_figure(message: str) -> str:
    return message.split("works is ")[1].split(" ")[0]


def test_a_trace_of_both_models_feeds_the_cache_simulation(
    run: Run, original: Path, packed: Path, text: Path, tmp_path: Path
) -> None:
    file, picture = tmp_path / "trace.npz", tmp_path / "figure.png"
    for model in (original, packed):
        made = run("trace", model, "--text", text, "-o", file, "--context", 64, "--samples", 2, "--json").json
        assert (made["tokens"], made["active"], made["experts"]) == (128, 2, [4, 4])
        assert made["guessers"] == ["gate+1", "norm+1", "residual"]
        shown = run("cache", file, "--json", "--plot", picture).json
        assert set(shown["hit_ratio"]) == {"lru", "lfu", "lfru", "random", "belady"}
        assert shown["recall"]["gate+1"]["4"] == 1.0
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert "belady" in run("cache", file, "--pool", "-n", 20).out
    assert "not a trace" in run("cache", text).err
    assert run("trace", packed, "--text", text, "-o", text).status == 1


def test_what_is_wrong_is_said_before_the_work(
    run: Run, original: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trilobite.load", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    refused = run("eval", original, "--text", text, "--tasks", "pqia", "--data", tmp_path)
    assert refused.status == 1
    assert "task 'pqia': unknown" in refused.err
    refused = run("stats", original, "--text", text, "-o", tmp_path / "none" / "x.json")
    assert refused.status == 1
    assert "there is no folder" in refused.err
    before = text.read_bytes()
    refused = run("stats", original, "--text", text, "-o", text)
    assert "is the text itself" in refused.err
    assert text.read_bytes() == before


# Mistakes.


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan {tmp}/none -r rtn3", "no such folder"),
        ("generate {tmp}/none hello", "no such folder"),
        ("plan {original} -r rtn3 --revision main", "--revision goes with a hub id"),
        ("plan {original} -r rtn4", "presets are rtn3, hqq3"),
        ("plan {original} -r {tmp}/bad.yaml", "not valid YAML"),
        ("plan {original} -r {tmp}/typo.yaml", "unknown key 'fromat'"),
        ("plan {original} -r rtn3 --keep experts", "role 'experts': expected one of attention, expert"),
        ("plan {original} -r rtn3 --group-size 50", "expected int{{2,3,4,8}}"),
        ("plan {original} -r rtn3 --method rnt", "method 'rnt'; expected one of rtn"),
        ("plan {original} -r rtn3 --rank frequency-4", "run `trilobite stats MODEL"),
        ("plan {original} -r rtn3 --stats {tmp}/none.json", "measure frequencies first"),
        ("compress {original} {tmp} -r rtn3", "is not empty"),
        ("compress {packed} {tmp}/out -r rtn3", "already quantized with 'trilobite'"),
        ("compress {original} {tmp}/out -r rtn3 --device tpu", "device 'tpu'"),
        ("generate {packed} hello --device tpu", "device 'tpu'"),
        ("inspect {tmp}", "config.json: missing"),
        ("generate {packed} ''", "the prompt is empty"),
        ("eval {packed} --text {tmp}/short.txt", "use a smaller --context"),
        ("eval {packed} --text {tmp}/none.txt --context 64", "cannot be read"),
        ("stats {original} --text {text} --samples 1 --context 64 -o {tmp}/none/s.json", "cannot be written"),
        ("stats {original} --text {text} --context 999 -o {tmp}/s.json", "made for 256 tokens, got 999"),
        (f"generate {{packed}} {'x' * 300}", "the model was made for 256; make it shorter"),
        (
            "compress {original} {tmp}/out -r gptq3 --calibration {text} --memory nan",
            "memory nan: expected GiB",
        ),
        (
            "compress {original} {tmp}/out -r gptq3 --calibration {text} --memory -1",
            "memory -1.0: expected GiB",
        ),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, original: Path, packed: Path, text: Path, tmp_path: Path, command: str, message: str
) -> None:
    (tmp_path / "short.txt").write_text("the sea")
    (tmp_path / "bad.yaml").write_text("rules: [\n  {roles: [expert")
    (tmp_path / "typo.yaml").write_text(yaml.safe_dump({"rules": [{"fromat": "int3-g64"}]}))
    folders = {"original": original, "packed": packed, "text": text, "tmp": tmp_path}
    words = [word.format(**folders).strip("'") for word in command.split()]
    failed = run(*words)
    assert failed.status == 1
    assert failed.out == ""
    assert failed.err.startswith("error: ")
    assert failed.err.count("\n") == 1
    assert message.format() in failed.err


@pytest.mark.parametrize(
    ("file", "change", "command", "message"),
    [
        ("trilobite.json", None, "inspect {}", "no trilobite.json; expected a folder made by"),
        ("tokenizer.json", lambda data: {}, "generate {} hello", "no usable tokenizer"),
        (
            "tokenizer_config.json",
            lambda data: data | {"model_max_length": [[]]},
            "generate {} hello",
            "no usable tokenizer",
        ),
        (
            "config.json",
            lambda data: data | {"vocab_size": data["vocab_size"] + 8},
            "generate {} hello",
            "copy the checkpoint again",
        ),
        (
            "config.json",
            lambda data: data | {"sliding_window": 0},
            "generate {} hello",
            "config.json: sliding_window 0; expected null or at least 1",
        ),
    ],
    ids=["report", "tokenizer", "settings of the tokenizer", "config", "window"],
)
def test_a_damaged_folder_is_one_line(
    run: Run,
    original: Path,
    packed: Path,
    tmp_path: Path,
    file: str,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None,
    command: str,
    message: str,
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(original if change else packed, folder)
    data = json.loads((folder / file).read_text())
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(json.dumps(change(data)))
    failed = run(*command.format(folder).split())
    assert (failed.status, failed.out) == (1, "")
    assert failed.err.startswith("error: ")
    assert failed.err.count("\n") == 1
    assert message in failed.err


def test_what_the_system_refuses_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        (tmp_path / "none" / "file").write_text("")

    monkeypatch.setattr("trilobite.recipe.load_recipe", refuse)
    failed = run("recipes", "rtn3")
    assert failed.status == 1
    assert failed.err.startswith(f"error: {tmp_path}/none/file: No such file or directory; check the path")
    assert failed.err.count("\n") == 1

    def blunder(*_: object) -> None:
        raise OSError("not the system's")

    monkeypatch.setattr("trilobite.recipe.load_recipe", blunder)
    with pytest.raises(OSError, match="not the system's"):
        run("recipes", "rtn3")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "bogus",
        "compress only",
        "plan x",
        "eval x",
        "plan x -r rtn3 --jobs 1",
        f"generate x y --seed {2**70}",
    ],
)
def test_wrong_usage_is_status_2(run: Run, command: str) -> None:
    assert run(*command.split()).status == 2


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text(TEXT)
    return path


def test_compress_with_calibration(run: Run, original: Path, prose: Path, tmp_path: Path) -> None:
    command = (
        "compress",
        original,
        tmp_path / "out",
        "-r",
        "gptq3",
        "--calibration",
        prose,
        "--device",
        "cpu",
    )
    first = run(*command, "--samples", 2, "--context", 32)
    assert first.status == 0, first.err
    assert "calibration: 2 windows of 32 tokens; 2 blocks of up to" in first.err
    assert "few calibration tokens" in first.out
    assert "layers.0.block_sparse_moe.experts" in first.out
    report = json.loads((tmp_path / "out" / "trilobite.json").read_text())
    assert report["identity"]["calibration"]["samples"] == 2
    assert run("generate", tmp_path / "out", "the sea", "-n", 4, "--device", "cpu").status == 0
    again = run(*command, "--samples", 2, "--context", 32)
    assert "already complete" in again.err
    assert "differs in its calibration" in run(*command, "--samples", 3, "--context", 32).err


def test_compress_with_kept_hessians(run: Run, original: Path, prose: Path, tmp_path: Path) -> None:
    keep = ("--propagate", "original", "--save-hessians", tmp_path / "h", "--context", 32, "--memory", 0.5)
    command = ("compress", original, tmp_path / "a", "-r", "gptq3", "--calibration", prose, "--device", "cpu")
    assert run(*command, *keep).status == 0
    other = ("compress", original, tmp_path / "b", "-r", "gptq2", "--device", "cpu")
    made = run(*other, "--rank", "dense-4", "--hessians", tmp_path / "h", "--json").json
    assert made["roles"]["attention"]["rank"]["max"] == 4


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-r", "gptq3"], 1, "needs a text to calibrate on; pass --calibration FILE"),
        (["-r", "search3", "--calibration", "TEXT"], 1, "needs no calibration; drop --calibration"),
        (["-r", "search3", "--samples", "4"], 2, "--samples goes with --calibration"),
        (["-r", "gptq3", "--calibration", "no/such"], 1, "no such file or folder"),
        (["-r", "gptq3", "--calibration", "TEXT", "--context", "999"], 1, "takes 2 to 256 tokens"),
        (["-r", "gptq3", "--calibration", "TEXT", "--propagate", "both"], 1, "expected one of quantized"),
        (["-r", "gptq3", "--calibration", "TEXT", "--save-hessians", "H"], 1, "add --propagate original"),
        (["-r", "gptq3", "--hessians", "no/such"], 1, "holds no manifest.json"),
        (["-r", "gptq3", "--hessians", "H", "--seed", "4"], 2, "--seed goes with --calibration"),
        (["-r", "gptq3", "--save-hessians", "H"], 1, "needs a text"),
        (
            ["--bits", "3.4", "--method", "search", "--save-hessians", "H"],
            1,
            "there are none to keep; add --method gptq",
        ),
        (
            ["--bits", "2.5", "--lattice", "--method", "gptq", "--save-hessians", "H", "--finetune", "block"],
            1,
            "drop --finetune",
        ),
        (["--bits", "3.4", "--save-hessians", "H", "--samples", "4"], 2, "--samples goes with --calibration"),
    ],
)
def test_calibration_mistakes(
    run: Run,
    original: Path,
    prose: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    found = run("compress", original, tmp_path / "out", *(prose if a == "TEXT" else a for a in arguments))
    assert found.status == status
    assert message in " ".join(found.err.replace("│", " ").split())
    assert status == 2 or found.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
