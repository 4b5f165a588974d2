"""Load on a running `kvconvert serve`, or on any other server of OpenAI's interface, through the `openai` package:

    kvconvert serve BUNDLE --max-batch 8 &
    python benchmarks/serve_load.py http://127.0.0.1:8000/v1 --requests 32 --together 8

Prompts are random token ids of one seed; every answer has all its tokens (`ignore_eos`). Writes requests and tokens per
second, and quantiles of the seconds to the first piece and between pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI


@dataclass
class Answer:
    """Seconds to the first piece and between later ones, and tokens by the server's count."""

    first: float = 0.0
    between: list[float] = field(default_factory=list)
    tokens: int = 0


async def ask(client: AsyncOpenAI, model: str, prompt: list[int], new_tokens: int) -> Answer:
    """Stream one completion."""
    answer, begun = Answer(), time.perf_counter()
    newest = begun
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=new_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for piece in stream:
        now = time.perf_counter()
        if piece.usage is not None:
            answer.tokens = piece.usage.completion_tokens
        elif newest == begun:
            answer.first = now - begun
        else:
            answer.between.append(now - newest)
        newest = now
    return answer


async def load(options: argparse.Namespace) -> None:
    """Send all requests, as many together as asked, and print the figures."""
    dice = random.Random(options.seed)
    prompts = [dice.choices(range(100, 1000), k=options.prompt_tokens) for _ in range(options.requests)]
    key = os.environ.get("KVCONVERT_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.url, api_key=key, timeout=3600) as client:
        model = (await client.models.list()).data[0].id
        places = asyncio.Semaphore(options.together)

        async def one(prompt: list[int]) -> Answer:
            async with places:
                return await ask(client, model, prompt, options.new_tokens)

        await ask(client, model, prompts[0], options.new_tokens)  # what is compiled or read once
        begun = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - begun
    tokens = sum(answer.tokens for answer in answers)
    print(f"{len(answers)} requests in {seconds:.2f} s: {len(answers) / seconds:.2f} requests/s, ", end="")
    print(f"{tokens / seconds:.1f} new tokens/s, {len(answers) * options.prompt_tokens / seconds:.1f} prompt tokens/s")
    between = [value for answer in answers for value in answer.between]
    for name, values in (("first piece", [answer.first for answer in answers]), ("between pieces", between)):
        ordered = sorted(values)
        half, most = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        print(f"{name}: median {half * 1e3:.0f} ms, 99th percentile {most * 1e3:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    for name, default in (("requests", 32), ("together", 8), ("prompt-tokens", 128), ("new-tokens", 64), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    asyncio.run(load(parser.parse_args()))
