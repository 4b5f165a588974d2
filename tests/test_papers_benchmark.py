"""`benchmarks/papers.py` measures what it says, keeps what it measured, and its pages are those of the results."""

import json
import sys

import papers
import papers_weights
import pytest
import torch
from tiny.checkpoints import TEXT, save_checkpoint
from transformers import AutoModelForCausalLM

from kvconvert.methods import PRESETS

ROWS = [(name, row) for name, rows in papers.TABLES.items() for row in rows]


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[f"{table}-{row.label}" for table, row in ROWS])
def test_every_row_can_be_measured_and_is_compared_with_another(table, row):
    assert row.against in {"", *(other.label for other in papers.TABLES[table] if other is not row)}
    if isinstance(row.case, papers.Case):
        assert row.case.recipe().kv is not None
        assert not row.case.recipe().weights.quantizes


def test_every_preset_for_text_is_in_a_table():
    measured = {row.case.preset for _, row in ROWS if isinstance(row.case, papers.Case)}
    # Latents are those of other models.
    ours = {name for name, scheme in PRESETS.items() if scheme.modality == "all" and not scheme.fits_latents}
    assert ours <= measured


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("papers")
    (place / "wikitext2-test.txt").write_text(TEXT * 4, encoding="utf-8")
    return save_checkpoint(place / "model", max_position_embeddings=512)


def test_rows_are_measured_once_and_what_is_simulated_differs(model, tmp_path, monkeypatch, capsys):
    tables = {
        "oscar": [row for row in papers.TABLES["oscar"] if row.label in ("both, l2", "both, maximum")],
        "kitty": [row for row in papers.TABLES["kitty"] if row.label in ("12.5%", "12.5%, random")],
        "budgets": papers.TABLES["budgets"][:1],
    }
    monkeypatch.setattr(papers, "TABLES", tables)
    monkeypatch.setattr(papers, "PROMPT", 256)
    options = ["--text", model.parent, "--segments", 1, "--length", 420, "--device", "cpu", "--output", tmp_path]
    command = ["papers.py", model, "--tables", *tables, "--work", tmp_path / "work", *options]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    papers.main()
    report = json.loads((tmp_path / "papers_model.json").read_text())
    kl = {key: row["texts"]["wikitext2-test"]["kl"][0] for key, row in report["rows"].items()}
    assert len(kl) == len({*kl.values()}) == 5
    assert all(0 < value < 10 for value in kl.values())
    assert set(report["persistence"]) == {"5%", "10%", "25%", "45%"}
    assert all(0 < share <= 1 for shares in report["persistence"].values() for share in shares)
    assert "| both, maximum | " in capsys.readouterr().out
    monkeypatch.setattr(papers, "compare", None)  # nothing is left to be measured
    papers.main()


def test_kept_channels_are_the_sources_and_a_common_scale_changes_nothing(model):
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"

    def weight(method, share=0.0, by="weight", scale=1.0):
        return papers_weights.quantized(papers_weights.Case(method, share, by, scale), model, 2, "cpu").state_dict()[
            name
        ]

    rounded = weight("rtn")
    assert torch.equal(weight("keep", 1.0), source[name])
    assert torch.equal(weight("scale", 1.0, scale=2.0), rounded)
    count = round(0.05 * source[name].shape[1])
    chosen = [(weight("keep", 0.05, by) == source[name]).all(0).nonzero().flatten() for by in ("weight", "activation")]
    assert chosen[0].tolist() == source[name].abs().mean(0).topk(count).indices.sort().values.tolist()
    assert len(chosen[1]) == count
    assert not torch.equal(*chosen)
    assert not torch.equal(weight("scale", 0.05, scale=2.0), rounded)
