"""Tables of quantized weights, from the reports of `benchmarks/weights.py` and `benchmarks/calibrate.py`."""

from __future__ import annotations

from statistics import median
from typing import Any

from tables import difference, signed, within

from kvconvert.tables import markdown_table as table

SAME = ("bits", "group_size", "samples", "length", "texts")  # in cases whose methods are compared
NAMES = {"rtn": "rounding", "awq": "AWQ", "gptq": "GPTQ", "awq+gptq": "AWQ + GPTQ"}
PEER_NAMES = {"gptaq": "GPTAQ", "foem": "GPTAQ + FOEM"}
COMPARED = (("awq+gptq", "awq"), ("awq+gptq", "gptq"), ("gptq", "awq"), ("awq", "rtn"))
SHOWN = "SmolLM2-135M-Instruct, NVIDIA H200"  # of calibrate.json, to users


def methods(report: dict[str, Any]) -> str:
    """A report: for each model its cases and their differences at the same width and groups."""
    parts = ["KL is to the source in nats per token, with 95% bootstrap intervals over segments; all in float32."]
    for name, model in report["models"].items():
        parts += [f"### {name}", _introduction(model["settings"]), _cases(model), _differences(model)]
    return "\n\n".join(part for part in parts if part)


def _introduction(s: dict[str, Any]) -> str:
    device = "CPU" if s["device"] == "cpu" else "GPU"
    return (
        f"{s['segments']} segments of {s['scored_per_segment']:,} scored tokens of {s['text']}, calibrated on "
        f"{s['calibrated_on']}, on a {device}."
    )


def _cases(model: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [("source", "", "", "", "0", f"{model['source_perplexity']:.2f}", "100%", "")]
    for row in _sorted(model):
        case = row["case"]
        data = f"{case['samples']} x {case['length']}{_texts(case)}"
        figures = (within(row["kl"]), f"{row['perplexity']:.2f}", f"{row['top1_agreement']:.1%}", f"{row['seconds']:,}")
        rows.append((_label(case), case["bits"], case["group_size"], data, *figures))
    head = ("method", "bits", "group size", "samples", "KL", "perplexity", "same first token", "seconds of calibration")
    return _varied(head, rows, len(rows) - 1)


def _differences(model: dict[str, Any]) -> str:
    """Paired differences in KL: AWQ + GPTQ against each alone and other programs, everything against AWQ, and corrected
    against not.
    """
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for better in _sorted(model):
        for worse in _sorted(model):
            one, two = better["case"], worse["case"]
            same = all((one.get(field) or []) == (two.get(field) or []) for field in SAME)
            alike = _corrected(one) == _corrected(two) or two["method"] in ("awq", "rtn")
            beside = "/" in two["method"] and (one["method"], _corrected(one)) == ("awq+gptq", True)
            other_method = beside or (alike and (one["method"], two["method"]) in COMPARED)
            gained = one["method"] == two["method"] and _corrected(one) > _corrected(two)
            if same and (other_method or gained):
                key = one["bits"], one["group_size"], f"{one['samples']} x {one['length']}{_texts(one)}"
                less = signed(difference(better["kl_by_segment"], worse["kl_by_segment"]))
                found.setdefault(key, {})[f"{_label(one)} less {_label(two)}"] = less
    if not found:
        return ""
    pairs = list(dict.fromkeys(pair for row in found.values() for pair in row))
    rows = [(*key, *(row.get(pair, "") for pair in pairs)) for key, row in found.items()]
    about = "Paired differences in KL; negative is better:"
    return f"{about}\n\n{_varied(('bits', 'group size', 'samples', *pairs), rows, len(rows))}"


def _varied(head: tuple[str, ...], rows: list[tuple[object, ...]], cases: int) -> str:
    """A table; columns of settings that are the same in its last rows, the `cases`, become a sentence before it."""
    settings = ("bits", "group size", "samples")
    same = {name for i, name in enumerate(head) if name in settings and len({row[i] for row in rows[-cases:]}) == 1}
    said = "; ".join(f"{name} {rows[-1][i]}" for i, name in enumerate(head) if name in same)
    kept = [i for i, name in enumerate(head) if name not in same]
    made = table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
    return f"{said.capitalize()}.\n\n{made}" if said and "method" in head else made


def _corrected(case: dict[str, Any]) -> bool:
    """Whether weights make up for the layers before; nothing did when older rows were measured."""
    return "gptq" in case["method"] and case.get("corrected", False)


def _label(case: dict[str, Any]) -> str:
    program, _, method = case["method"].rpartition("/")
    return f"{program} {(NAMES | PEER_NAMES)[method]}".strip() + ", corrected" * _corrected(case)


def _sorted(model: dict[str, Any]) -> list[dict[str, Any]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        case = row["case"]
        return -case["bits"], -case["group_size"], len(case.get("texts", ())), case["samples"], -row["kl"]["mean"]

    return sorted(model["cases"].values(), key=key)


def _texts(case: dict[str, Any]) -> str:
    return f" of {' and '.join(case['texts'])}" if case.get("texts") else ""


def beside_peers(report: dict[str, Any]) -> str:
    """kvconvert beside other programs: time, memory and loss of every case, then what each pair says."""
    return "\n\n".join(_section(label, found) for label, found in report.items())


def summary(report: dict[str, Any]) -> str:
    """The same of one model for users, by what is lost."""
    found = report[SHOWN]
    rows = [
        (_name(name), f"{case['quality']['kl']['mean']:.3f}", f"{case['quality']['perplexity']:.2f}",
         f"{_median(case, 'wall_s'):.0f}")
        for name, case in sorted(found["cases"].items(), key=lambda item: item[1]["quality"]["kl"]["mean"])
    ]  # fmt: skip
    rows.insert(0, ("source", "0", f"{found['source_perplexity']:.2f}", ""))
    return table(("4 bits by", "KL", "perplexity", "seconds"), rows)


def _section(label: str, found: dict[str, Any]) -> str:
    s, cases = found["settings"], found["cases"]
    of_peers = [case["rounds"][0]["versions"] for name, case in cases.items() if not name.startswith("kvconvert")]
    peers = {
        f"{program} {versions[package]}"
        for program, package in (("llm-compressor", "llmcompressor"), ("GPTQModel", "gptqmodel"))
        for versions in of_peers
        if package in versions
    }
    rounds = len(next(iter(cases.values()))["rounds"])
    quality = all("quality" in case for case in cases.values())
    listed = " and ".join(f"{value:.1f} s for {program}" for program, value in found.get("import_s", {}).items())
    about = (
        f"**{label}**: {s['samples']} x {s['length']} tokens of {s['calibration']}, {s['bits']} bits in groups of "
        f"{s['group_size']}; {' and '.join(sorted(peers))} with batches of {s['peer_batch']} and dtype "
        f"`{s['peer_dtype']}`"
        + (f"; medians of {rounds} rounds" if rounds > 1 else "")
        + (f"; KL on {s['segments']} segments of {s['scored_per_segment']:,} tokens of {s['text']}" if quality else "")
        + "."
        + (f" Of the wall time imports take {listed}." if listed else "")
    )
    head = ["", "wall time, s", "processor time, s", "peak memory, GB"] + ["KL", "perplexity"] * quality
    rows = [["source", "", "", "", "0", f"{found['source_perplexity']:.2f}"]] if quality else []
    for name, case in cases.items():
        peak = max(r["peak_anonymous_bytes"] for r in case["rounds"]) / 1e9
        row = [_name(name), *(f"{_median(case, field):.1f}" for field in ("wall_s", "processor_s")), f"{peak:.2f}"]
        rows.append(row + ([within(case["quality"]["kl"]), f"{case['quality']['perplexity']:.2f}"] if quality else []))
    return "\n\n".join([about, table(head, rows), _ratios(cases, quality)])


def _name(case: str) -> str:
    program, _, method = case.partition(":")
    return f"{program} {NAMES[method]}"


def _median(case: dict[str, Any], field: str) -> float:
    return median(found[field] for found in case["rounds"])


def _ratios(cases: dict[str, Any], quality: bool) -> str:
    """Every case of ours beside every other program's, as sentences."""
    sentences = []
    for ours in (name for name in cases if name.startswith("kvconvert")):
        for theirs in (name for name in cases if not name.startswith("kvconvert")):
            pairs = list(zip(cases[theirs]["rounds"], cases[ours]["rounds"], strict=True))
            wall = median(them["wall_s"] / us["wall_s"] for them, us in pairs)
            sentence = (
                f"- {NAMES[ours.partition(':')[2]]} beside {theirs.partition(':')[0]}'s "
                f"{NAMES[theirs.partition(':')[2]]}: {wall:.2f} times as fast"
            )
            if quality:
                segments = (cases[name]["quality"]["kl_by_segment"] for name in (ours, theirs))
                sentence += f", KL {signed(difference(*segments))}"
            sentences.append(f"{sentence}.")
    return "\n".join(sentences)
