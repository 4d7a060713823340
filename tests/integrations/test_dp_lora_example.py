"""The examples of fine-tuning: they run without data, name their unit, and reject bad input in one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from requires import require

require("torch")
require("opacus")
require("transformers")
require("peft")
EXAMPLES = Path(__file__).parents[2] / "examples" / "dp-lora"
import language_model  # noqa: E402

SMALL = ["--rows", "60", "--batch-size", "20", "--length", "16"]


def run(name, folder, *options):
    (folder / "canary-seed").write_text("0123456789abcdef" * 4)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COALMINE_DATA_DIR": str(folder / "nothing here")}
    command = [sys.executable, str(EXAMPLES / name), "--out", "run", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [("train.py", ["--model", "gpt2"]), ("trainer.py", ["--mode", "ghost"]), ("train.py", ["--text", "lines.txt"])],
)
def test_an_example_runs_without_data(name, options, tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"speech number {number}\n" for number in range(80)))
    unit = ["--unit", "speech"] if "--text" in options else []
    done = run(name, tmp_path, *SMALL, *options, *unit)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["privacy_unit"] == ("speech" if unit else "sentence")
    assert result["audited"]["sampler"]["status"] == "checked"
    assert result["canaries"] == 60  # as many as there are rows
    assert "by the accountant" in done.stdout
    assert (tmp_path / "run" / "adapters" / "adapter_config.json").exists()
    again = run(name, tmp_path, *SMALL)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.splitlines()[-1] == f"{name}: run holds a run already: choose another --out, or remove it"


@pytest.mark.full
def test_planted_secrets_are_scored_and_searched_for(tmp_path):
    done = run("train.py", tmp_path, "--rows", "60", "--batch-size", "20", "--length", "48", "--secrets", "60")
    assert done.returncode == 0, done.stderr[-2000:]
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["audited"]["records"]["scored"]
    assert (stored["kind"], stored["score"], stored["rungs"][0]["delta"]) == ("planted secrets", "likelihood", 1e-5)
    assert re.search(r"of \d+ planted secrets greedy decoding returns 0; exposure", done.stdout)


def options_of(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", "nowhere", *arguments])
    return language_model.read_options("An example.", out="nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--rows", value] for value in ("0", "-5", "x", "1.5")),
        *(["--noise-multiplier", value] for value in ("0", "-1", "nan", "inf", "x")),
        *(["--epochs", "0"], ["--batch-size", "-3"], ["--unit", "nonsense"], ["--mod", "ghost"], ["--mode", "ew"]),
    ],
)
def test_wrong_options_end_with_exit_code_2(arguments, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        options_of(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert re.search("must be|unrecognized arguments|invalid choice", capsys.readouterr().err)


def test_wrong_files_and_models_end_with_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COALMINE_DATA_DIR", str(tmp_path))
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "folder").mkdir()
    wrong = {
        ("--text", "missing.txt"): "missing.txt: No such file",
        ("--text", "folder"): "Is a directory",
        ("--text", "binary.txt"): "must be a text in UTF-8",
        ("--text", "empty.txt"): "at least two rows, got 0",
        ("--model", "folder"): "must be llama, gpt2 or a folder with a config.json",
        ("--length", "4096"): "--length must be at most 2048",
        ("--unit", "user"): "--unit user needs",
    }

    def load(options):
        language_model.load_model(options)
        language_model.read_rows(options)

    for arguments, message in wrong.items():
        with pytest.raises(SystemExit) as ended:
            language_model.run_example(load, options_of(monkeypatch, *arguments))
        error = capsys.readouterr().err
        assert (ended.value.code, len(error.splitlines())) == (2, 1), error
        assert message in error


def test_tied_weights_are_not_sharded(monkeypatch, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 300, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path)
    options = options_of(monkeypatch, "--model", str(tmp_path))
    monkeypatch.setattr(language_model, "_load_tokenizer", lambda _: None)
    with pytest.raises(ValueError, match="FSDP2 cannot shard tied weights"):
        language_model.load_model(options, sharded=True)
