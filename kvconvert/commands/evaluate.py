"""kvconvert eval BUNDLE."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from kvconvert.commands import count_option, device_option, dtype_option, head_option, quiet
from kvconvert.errors import UsageError


@click.command("eval")
@click.argument("bundle")
@click.option("--against", metavar="MODEL", help="Model to compare with; the bundle's source by default.")
@click.option(
    "--data",
    metavar="SOURCE",
    help="Held-out text; the text that ships with kvconvert by default. With --task gsm8k, the file of its problems.",
)
@count_option("--tokens", help="Tokens to score, rounded up to whole segments; 4,096 by default, 8,192 with --full.")
@count_option(
    "--context",
    help="Tokens of a segment, and of the prompts of retrieval and probes; 1,024 by default. With --task: before each "
    "problem, none by default.",
)
@click.option(
    "--only",
    metavar="PART,...",
    help="Measure these: perplexity, kl, top1, retrieval, probes, free-running, images, cache, weights.",
)
@device_option()
@dtype_option("the model's, on a CPU float32")
@head_option()
@click.option(
    "--harness", "tasks", metavar="TASK,...", help="Measure tasks of lm-evaluation-harness, or .yaml files, instead."
)
@click.option(
    "--task",
    type=click.Choice(["humaneval", "gsm8k"]),
    help="Let source and bundle solve problems with checkable answers instead.",
)
@count_option("--seeds", help="With --task: sampled answers to each problem beside the greedy one; none by default.")
@count_option("--limit", help="Examples of each task of --harness, or problems of --task; all by default.")
@click.option("--full", is_flag=True, help="Measure probes and free running, too, and score more; --write does so.")
@click.option("--write", is_flag=True, help="Put the figures into the bundle's manifest and card.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every figure.")
def evaluate(
    bundle: str,
    only: str | None,
    tokens: int | None,
    tasks: str | None,
    task: str | None,
    seeds: int | None,
    limit: int | None,
    full: bool,
    write: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how far BUNDLE departs from its source, decoding with the low-bit cache.

    By default that is KL and perplexity, retrieval of a number in a long prompt, and sizes; --full measures the rest.
    How long it takes is said before.

    With --task, both solve the problems of a benchmark instead; programs that they write run in processes of their own.
    With --harness, tasks of lm-evaluation-harness are measured instead, and with --against those of that model, too.
    """
    if options["head_bits"] is None:
        del options["head_bits"]
    elif write or tasks is not None or task is not None:
        flag = "--write" if write else "--harness" if tasks is not None else "--task"
        raise UsageError(f"--head-bits does not apply to {flag}; leave one of them out.")
    other = {"only": only, "harness": tasks, "task": task}
    instead = next((f"--{name}" for name, value in other.items() if value is not None), None)
    for flag, asked in (("--write records", write), ("--full is", full)):
        if asked and instead is not None:
            raise UsageError(f"{flag} a whole evaluation; leave {instead} out.")
    if tasks is not None and task is not None:
        raise UsageError("--task and --harness measure different things; leave one of them out.")
    if limit is not None and task is None and tasks is None:
        raise UsageError("--limit counts problems of --task or --harness; give one of them, or leave it out.")
    if seeds is not None and task is None:
        raise UsageError("--seeds applies to --task alone; give one, or leave it out.")
    instead = "--task" if task is not None else "--harness" if tasks is not None else None
    others = {"only": only, "tokens": tokens}
    if tasks is not None:
        others |= {"data": options.pop("data"), "context": options.pop("context")}
    given = [f"--{name}" for name, value in others.items() if value is not None]
    if instead is not None and given:
        raise UsageError(f"{given[0]} does not apply to {instead}; leave one of them out.")
    from kvconvert.fidelity import TEXT_ALONE, check_context, check_tasks, parts_asked

    parts = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    parts_asked(parts)
    named = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    if named is not None:
        check_tasks(named)
    from kvconvert.bundle.locate import check_images, check_place

    check_place(bundle)
    if parts is not None and "images" in parts:
        check_images(bundle, TEXT_ALONE)
    model = Path(bundle)
    if options["against"] is not None:
        from kvconvert.models import check_model

        model = check_model(options["against"])
    from kvconvert.models.positions import check_length, stated_positions

    if instead is None:
        check_context(options["context"], stated_positions(model))
    else:
        check_length("context", options.get("context"), stated_positions(model))
    if task is not None:
        from kvconvert.fidelity.tasks.problems import TASKS

        TASKS[task].problems(options["data"])
    elif options.get("data") is not None:
        from kvconvert.data.sources import check_sources

        check_sources(options["data"])
    if options["against"] is None and tasks is None and os.path.exists(bundle):
        from kvconvert.bundle.reader import open_bundle
        from kvconvert.fidelity import source_of

        source_of(open_bundle(bundle, verify="plan").manifest, None)
    if task is not None:
        quiet()
        from kvconvert.fidelity.tasks.solving import solve

        before = options.pop("context") or 0
        solved = solve(bundle, task, limit=limit, seeds=seeds or 0, context=before, **options)
        click.echo(json.dumps(solved.to_dict(), indent=2) if as_json else solved.table())
        return
    if named is not None:
        from kvconvert.fidelity.harness import harness

        quiet()
        found = harness(bundle, named, limit=limit, **options)
        click.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.table())
        return
    full = full or write
    if not full and parts is None:
        click.echo("Leaving out probes and free-running; --full measures them, and more text.", err=True)
    from kvconvert.fidelity.evaluate import evaluate as run

    quiet()
    if write:
        from kvconvert.fidelity.report import check_recordable, record

        check_recordable(bundle)
    if tokens is not None:
        options["tokens"] = tokens
    report = run(bundle, only=parts, full=full, for_record=write, **options)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        from kvconvert.fidelity.report import table

        click.echo(table(report))
    if write:
        missed = record(bundle, report).missed
        said = f"; it misses limits of its recipe: {'; '.join(missed)}" if missed else ""
        click.echo(f"Wrote these figures into {bundle}{said}.", err=True)
