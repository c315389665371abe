import json
import resource
import subprocess
import sys

import pytest

from longtail.cli.main import COMMANDS, main


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_top_level_help_lists_every_command_quickly():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "longtail", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(name in done.stdout for name in COMMANDS)
    # Processor time, so that other tests running at the same time do not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_help_imports_nothing_heavy():
    code = "import sys; from longtail.cli import main; main(['--help']); main(['train', '--help'])"
    code = f"try:\n    exec({code!r})\nexcept SystemExit: pass\nimport sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tyro-write-completion", "csh", "x"], "unknown shell 'csh'; choose from: bash, zsh, fish"),
        (["trian"], "unknown command 'trian' (did you mean 'train'?)"),
        (["train", "cifar10-lt", "--out", "x"], "'cifar10-lt' is not a file, folder or recipe (did you mean"),
        (["train", "--out", "x"], "name the data: longtail train DATA … (DATA is a recipe, an image folder, or a"),
        (["train", "--out=x", "--epochs"], "missing value for argument '--epochs'"),
        (["train", "digits-lt", "--out", "{tmp}", "--resume=yes"], "unrecognized options: yes"),
        (["train", "digits-lt", "--resume", "--overwrite", "--out", "{tmp}"], "give only one of them"),
        (["train", "digits-lt", "--out", "{tmp}", "--method", "softmx"], "did you mean 'softmax'"),
        (["train", "digits-lt", "--out", "{tmp}", "--backbone", "vgg"], "unknown backbone 'vgg'; choose from: digits"),
        (["train", "digits-lt", "--out", "{tmp}", "--data", "mnist"], "unknown data set 'mnist'; choose from: digits"),
        (["train", "digits-lt", "--out", "{tmp}", "--augment", "spin"], "unknown augmentation 'spin'"),
        (["train", "digits-lt", "--out", "{tmp}", "--sampler", "odd"], "unknown sampler 'odd'"),
        (
            ["train", "digits-lt", "--out", "{tmp}", "--imbalance", "0.5"],
            "longtail: --imbalance must be a number, at least 1",
        ),
        (["train", "digits-lt", "--out", "{tmp}", "--imbalance", "500"], "is left without images"),
        (["train", "digits-lt", "--out", "{tmp}", "--device", "tpu9"], "unknown device 'tpu9'"),
        (["train", "cifar10-lt-100", "--out", "{tmp}", "--root", "{tmp}"], "cifar10 not found in"),
        (["train", "digits-lt", "--out", "{tmp}", "--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["train", "digits-lt", "--out", "{tmp}", "--weights", "nowhere.pth"], "nowhere.pth does not exist"),
        (["evaluate", "{tmp}"], "is not a run folder: it has no run.json; `longtail train` makes one"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(capsys, tmp_path, words, message):
    code, out, error = run(capsys, *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert code == 2
    assert out == ""
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "x"),
        ("LONGTAIL_TIMEOUT", "x"),
        ("LONGTAIL_JOIN_TIMEOUT", "1.5"),
    ],
)
def test_an_environment_that_cannot_be_read_is_named(capsys, monkeypatch, tmp_path, name, value):
    for known, usual in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(known, usual)
    monkeypatch.setenv(name, value)
    code, out, error = run(capsys, "evaluate", str(tmp_path))
    assert (code, out) == (2, "")
    assert error.startswith(
        f"longtail: environment variable {name} is '{value}'; unset it or set a whole number of at least "
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize("size", [None, "", "1"])
def test_a_rank_that_another_launcher_left_does_not_silence_one_process(capsys, monkeypatch, size):
    monkeypatch.setenv("RANK", "1")
    if size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", size)
    code, out, _ = run(capsys, "methods", "--json")
    assert code == 0
    assert json.loads(out)


def test_train_and_evaluate_end_to_end(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('epochs = 12\naugment = ["small-crop", "flip"]\nbatch-size = 32\n')
    words = ["train", "digits-lt", "--config", "my.toml", "--lr", "0.05", "--out", "run", "--json", "--device", "cpu"]
    code, out, error = run(capsys, *words)
    assert (code, error) == (0, "")
    validation = json.loads(out)["validation"]
    assert validation["samples"] == sum(map(sum, validation["confusion"]))
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["epochs"], config["iterations"], config["lr"], config["batch_size"]) == (12, None, 0.05, 32)
    assert config["augment"] == ["small-crop", "flip"]

    code, out, error = run(capsys, "evaluate", "run")
    assert code == 0
    assert "Balanced" in out
    assert "classes, head to tail" in out
    written = json.loads((tmp_path / "run" / "metrics-test.json").read_text())
    assert written["samples"] == 600
    code, out, _ = run(capsys, "evaluate", "run", "--json")
    assert json.loads(out)["top1"] == written["top1"]
    code, _, error = run(capsys, "train", "digits-lt", "--out", "run")
    assert code == 2
    assert "holds a run already" in error
    code, _, error = run(capsys, "train", "--out", "run", "--resume")
    assert code == 0
    assert "already finished" in error


def test_unknown_setting_in_toml_is_named(capsys, tmp_path):
    (tmp_path / "my.toml").write_text("epoch = 12\n")
    code, _, error = run(capsys, "train", "digits-lt", "--config", str(tmp_path / "my.toml"), "--out", "x")
    assert code == 2
    assert "unknown setting 'epoch' (did you mean 'epochs'?)" in error
    (tmp_path / "my.toml").write_text("epochs = = 12\n")
    code, _, error = run(capsys, "train", "digits-lt", "--config", str(tmp_path / "my.toml"), "--out", "x")
    assert code == 2
    assert "is not valid TOML" in error


def test_the_table_of_methods_fits_80_columns_and_cuts_no_word(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {"cross-entropy", "NeurIPS", "library's", "own", "logit-adjustment"} <= words
