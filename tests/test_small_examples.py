"""The examples that show a use in a few lines, run on a tiny checkpoint where they take one."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
ON_A_CHECKPOINT = {  # and what each prints of its report
    "patch_checkpoint": "2 of 2 sites fused",
    "paged_cache": "2 of 2 sites fused",
    "compile_backend": "2 of 2 sites fused",
    "serve_a_batch": "2 of 2 sites fused",
}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from a checkout")


@pytest.fixture
def example(monkeypatch):
    """Import an example by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.parametrize(("name", "says"), ON_A_CHECKPOINT.items(), ids=ON_A_CHECKPOINT)
def test_on_a_checkpoint(example, tiny_llama, capsys, name, says):
    example(name).main(str(tiny_llama))
    assert says in capsys.readouterr().out


def test_a_compiled_model_is_the_original(example, tiny_llama, capsys):
    example("compile_backend").main(str(tiny_llama))
    error = capsys.readouterr().out.split("differ by ")[1].split()[0]
    assert float(error) < 1e-5


def test_a_batch_that_differs_is_an_error(example, tiny_llama, monkeypatch):
    """Padding that nothing hides changes the tokens."""
    from transformers import PreTrainedTokenizerFast

    module = example("serve_a_batch")
    monkeypatch.setattr(module, "PROMPTS", ("why", "the sky", "blue sky why the"))
    module.main(str(tiny_llama))

    call = PreTrainedTokenizerFast.__call__

    def unmasked(*args, **kwargs):
        inputs = call(*args, **kwargs)
        inputs["attention_mask"].fill_(1)
        return inputs

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", unmasked)
    with pytest.raises(AssertionError, match=r"goes on with .*, alone with"):
        module.main(str(tiny_llama))


@pytest.mark.parametrize("name", ["own_attention", "own_pipeline"])
def test_without_a_checkpoint(example, capsys, name):
    example(name).main()
    printed = capsys.readouterr().out
    assert "1 of 1 sites fused" in printed
    assert float(printed.rsplit(":", 1)[1]) < 1e-5
