"""`modality`: exactly the visual (or audio) tokens of a prompt go to low-bit spans, everything else stays as it is."""

import copy
from dataclasses import replace

import pytest
import torch
from quantized_oracle import fake_quantize
from tiny.media import AUDIO, IMAGE, VIDEO
from tiny.models import ARCHITECTURES, GREEDY, random_ids
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvconvert.errors import CacheError, RecipeError, UnsupportedModelError
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.runtime import KVCache, watch_inputs
from kvconvert.runtime.cache import attend as attend_module
from kvconvert.runtime.cache.attend import attend

SPAN = KVScheme(key_granularity="span", value_granularity="span")
VISUAL, AUDIBLE = replace(SPAN, modality="visual"), replace(SPAN, modality="audio")


# --- an independent model of it


class MaskedLayer(DynamicLayer):
    """Full precision; when a single token arrives, the masked tokens of each prompt become their quantized image.

    `mask` is bool [B, positions of all prompts so far]; of later turns, positions from `done` on are quantized.
    """

    def __init__(self, mask, bits):
        super().__init__()
        self.mask, self.bits, self.done = mask, bits, 0

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized and key_states.shape[2] == 1 and self.done < self.mask.shape[1]:
            for row, mask in enumerate(self.mask):
                at = mask.nonzero().flatten()
                at = at[at >= self.done]
                for side in (self.keys, self.values) if len(at) else ():
                    tokens = side[row][:, at].transpose(1, 2)
                    side[row, :, at] = fake_quantize(tokens, self.bits, len(at)).transpose(1, 2)
            self.done = self.mask.shape[1]
        return super().update(key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.mask = self.mask[beam_idx]


def reference_cache(model, mask, bits=2):
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    cache.layers = [MaskedLayer(mask, bits) for _ in range(count)]
    return cache


def with_eager(model, run):
    model.set_attn_implementation({"": "eager", "text_config": "eager"})
    try:
        return run()
    finally:
        model.set_attn_implementation({"": "kvconvert", "text_config": "kvconvert"})


def watched(name, **overrides):
    model = ARCHITECTURES[name].build("kvconvert", **overrides)
    watch_inputs(model)
    return model


@pytest.fixture(scope="module")
def llava():
    return watched("llava")


def prompt(length: int, starts: list[int], seed: int = 1) -> torch.Tensor:
    """Ids of one row, with four tokens of an image at each start."""
    ids = random_ids(1, length, seed)
    for start in starts:
        ids[0, start : start + 4] = IMAGE
    return ids


def pixels(ids: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """An image for every four image tokens."""
    count = int((ids == IMAGE).sum()) // 4
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator)} if count else {}


def compare(model, inputs, mask, scheme=VISUAL, **arguments) -> KVCache:
    """Generate through spans and by the reference; the tokens have to agree, and to depend on what is quantized."""
    cache, bits = KVCache(model.config, scheme), scheme.key_bits

    def run(cache):
        return model.generate(**inputs, past_key_values=cache, max_new_tokens=8, **GREEDY | arguments).tolist()

    got = run(cache)
    assert got == with_eager(model, lambda: run(reference_cache(model, mask, bits)))
    return cache


def positions(cache: KVCache, row: int = 0, layer: int = 0) -> tuple[list[list[int]], list[int]]:
    """Positions of the tokens in a sequence's spans, and of those in full precision."""
    sequence = cache.layers[layer].store.sequences[row]
    spans = [span.positions.slice(0, span.tokens).tolist() for span in sequence.spans]
    assert sequence.keys.buffered == sequence.values.buffered == len(sequence.positions)
    return spans, sequence.positions.slice(0, len(sequence.positions)).tolist()


# --- exactly these tokens


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("starts", [[0], [2, 6, 20], [26], []])
def test_image_tokens_alone_are_quantized_wherever_they_stand(llava, bits, starts):
    ids = prompt(30, starts)
    cache = compare(
        llava, {"input_ids": ids} | pixels(ids), ids == IMAGE, replace(VISUAL, key_bits=bits, value_bits=bits)
    )
    visual = (ids[0] == IMAGE).nonzero().flatten().tolist()
    assert positions(cache) == ([visual] if visual else [], [c for c in range(37) if c not in visual])


def test_what_is_quantized_decides_what_is_generated(llava):
    """So that the comparisons above can fail."""
    ids = prompt(30, [2, 6, 20])
    inputs = {"input_ids": ids} | pixels(ids)
    one_bit = [replace(scheme, key_bits=1, value_bits=1) for scheme in (VISUAL, SPAN)]
    found = {
        str(
            llava.generate(**inputs, past_key_values=KVCache(llava.config, scheme), max_new_tokens=8, **GREEDY).tolist()
        )
        for scheme in (*one_bit, "kivi")
    }
    assert len(found) == 3  # "kivi" quantizes nothing of a prompt this short


@pytest.mark.quick("llava_onevision", "qwen2_5_vl", "gemma3", "paligemma")
@pytest.mark.parametrize(
    "name", [name for name, tiny in ARCHITECTURES.items() if tiny.multimodal and tiny.media.token == IMAGE]
)
def test_every_vision_model_generates_as_with_its_images_alone_quantized(name):
    model, tiny = watched(name), ARCHITECTURES[name]
    inputs = tiny.inputs(batch=2, length=40, pieces=2)
    cache = compare(model, inputs, inputs["input_ids"] == IMAGE)
    assert sum(span.tokens for span in cache.layers[0].store.sequences[1].spans) == tiny.media.count * 2


def test_videos_are_visual_like_images():
    model, tiny = watched("qwen2_5_vl"), ARCHITECTURES["qwen2_5_vl"]
    inputs = tiny.inputs(batch=1, length=40)
    ids = inputs["input_ids"]
    ids[0, 20:30] = torch.tensor([tiny.media.start, *[VIDEO] * 8, tiny.media.end])
    inputs["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    generator = torch.Generator().manual_seed(3)
    inputs["pixel_values_videos"] = torch.randn(32, 3 * 2 * 14 * 14, generator=generator)
    inputs["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    cache = compare(model, inputs, (ids == IMAGE) | (ids == VIDEO))
    assert positions(cache)[0] == [[*(ids[0] == IMAGE).nonzero().flatten().tolist(), *range(21, 29)]]


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni_thinker"])
def test_audio_tokens_are_a_modality_of_their_own(name):
    model, tiny = watched(name), ARCHITECTURES[name]
    inputs = tiny.inputs(batch=1, length=40)
    cache = compare(model, inputs, inputs["input_ids"] == AUDIO, AUDIBLE)
    assert [len(span) for span in positions(cache)[0]] == [16]


# --- batches, turns, beams


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = max(row.shape[1] for row in rows)
    padding = [length - row.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (n, 0)) for row, n in zip(rows, padding, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (length - n) for n in padding])
    return {"input_ids": ids, "attention_mask": mask}


def test_rows_of_a_left_padded_batch_with_different_images_are_as_each_alone(llava):
    rows = [prompt(40, [3, 20], seed=1), prompt(31, [], seed=2), prompt(12, [8], seed=3)]
    batch = left_padded(rows)
    images, arguments = pixels(batch["input_ids"])["pixel_values"], GREEDY | {"max_new_tokens": 12}
    cache = compare(llava, batch | {"pixel_values": images}, batch["input_ids"] == IMAGE)
    assert [len(positions(cache, row)[0]) for row in range(3)] == [1, 0, 1]
    together = llava.generate(**batch, pixel_values=images, past_key_values=KVCache(llava.config, VISUAL), **arguments)
    for row, ids, own in zip(together, rows, (images[:2], None, images[2:]), strict=True):
        seen = {} if own is None else {"pixel_values": own}
        alone = llava.generate(ids, **seen, past_key_values=KVCache(llava.config, VISUAL), **arguments)
        assert alone[0, -12:].tolist() == row[-12:].tolist()


def test_an_image_in_a_later_turn_has_its_own_span_and_earlier_ones_stay(llava):
    ids, cache, expected = prompt(20, [4]), KVCache(llava.config, VISUAL), None
    mask, spans = torch.zeros(1, 0, dtype=torch.bool), []
    reference = reference_cache(llava, mask)
    for starts in ([4], [], [2, 10]):
        mask = torch.cat([mask, (ids[:, mask.shape[1] :] == IMAGE)], 1)
        for layer in reference.layers:
            layer.mask = mask

        def turn(cache, ids=ids):
            new = ids[:, cache.get_seq_length() :]
            arguments = pixels(new) | {"past_key_values": cache, "max_new_tokens": 6} | GREEDY
            return llava.generate(ids, **arguments)

        got, expected = turn(cache), with_eager(llava, lambda turn=turn: turn(reference))
        assert got.tolist() == expected.tolist()
        before, spans = spans, cache.layers[1].store.rows[0].spans.copy()
        assert all(old is new for old, new in zip(before, spans, strict=False))
        assert len(spans) == len(before) + bool(starts)
        ids = torch.cat([got, prompt(16, [2, 10] if not starts else [], seed=len(spans) + 5)], 1)
    assert [len(span) for span in positions(cache)[0]] == [4, 8]


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 4}])
def test_beams_share_the_images_span(llava, arguments):
    ids = torch.cat([prompt(30, [2, 20], seed=1), prompt(30, [9], seed=2)])
    beams = ids.repeat_interleave(arguments["num_beams"], 0)
    cache = compare(llava, {"input_ids": ids} | pixels(ids), beams == IMAGE, **arguments)
    stored = [row.spans for row in cache.layers[0].store.rows]
    assert all(len(spans) == 1 for spans in stored)


def test_several_return_sequences_have_the_images_of_their_prompt(llava):
    ids, cache = prompt(30, [2, 20]), KVCache(llava.config, VISUAL)
    torch.manual_seed(0)
    arguments = GREEDY | {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    llava.generate(ids, **pixels(ids), past_key_values=cache, **arguments)
    assert [len(positions(cache, row)[0][0]) for row in range(3)] == [8, 8, 8]


def test_prompt_lookup_generates_the_same_and_drafts_stay_out_of_spans(llava):
    ids = prompt(30, [2, 20])
    ids[0, 26:30] = ids[0, 8:12]
    cache = compare(llava, {"input_ids": ids} | pixels(ids), ids == IMAGE)
    arguments = {"max_new_tokens": 8, "prompt_lookup_num_tokens": 3} | GREEDY | pixels(ids)
    assisted = KVCache(llava.config, VISUAL)
    plain = KVCache(llava.config, VISUAL)
    got = llava.generate(ids, past_key_values=assisted, **arguments)
    arguments.pop("prompt_lookup_num_tokens")
    assert got.tolist() == llava.generate(ids, past_key_values=plain, **arguments).tolist()
    assert positions(assisted)[0] == positions(cache)[0]


def test_a_prompt_in_chunks_gives_one_span(llava):
    whole, pieces = KVCache(llava.config, VISUAL), KVCache(llava.config, VISUAL)
    ids = prompt(30, [2, 14])
    llava(ids, **pixels(ids), past_key_values=whole)
    for part in ids.split(12, 1):
        llava(part, **pixels(part), past_key_values=pieces)
    for cache in (whole, pieces):
        cache.seal()
        assert positions(cache)[0] == [[2, 3, 4, 5, 14, 15, 16, 17]]


def test_a_cropped_prompt_forgets_the_images_that_were_cut_off(llava):
    cache, ids = KVCache(llava.config, VISUAL), prompt(30, [2, 14])
    llava(ids, **pixels(ids), past_key_values=cache)
    cache.crop(-14)  # two of the second image's tokens stay
    llava(random_ids(1, 10), past_key_values=cache)
    cache.seal()
    assert positions(cache)[0] == [[2, 3, 4, 5, 14, 15]]


def test_layers_that_share_keys_read_the_prompt_in_full_precision_before_it_is_sealed():
    """Gemma 3n's last layers attend to earlier layers' keys within the same forward pass."""
    model = ARCHITECTURES["gemma3n_text"].build("kvconvert")
    model.config.image_token_id = 7
    watch_inputs(model)
    ids = random_ids(2, 60)
    ids[0, 5:20], ids[1, 30:36] = 7, 7
    one_bit = replace(VISUAL, key_bits=1, value_bits=1)
    compare(model, {"input_ids": ids}, ids == 7, one_bit)
    # A bundle's generate announces whole prompts.
    exact, whole = KVCache(model.config, one_bit), KVCache(model.config, one_bit)
    whole.expect_whole_prompt()
    assert torch.equal(model(ids, past_key_values=whole).logits, model(ids, past_key_values=exact).logits)


# --- schemes


def test_sink_tokens_stay_in_full_precision_even_where_they_are_visual(llava):
    ids, cache = prompt(20, [0, 8]), KVCache(llava.config, replace(VISUAL, sink_tokens=3))
    llava(ids, **pixels(ids), past_key_values=cache)
    cache.seal()
    assert positions(cache)[0] == [[3, 8, 9, 10, 11]]


def test_tau_shifts_the_extremes_over_visual_tokens_only(llava, monkeypatch):
    """With everything shifted flat, each visual token has the smallest visual score, and text scores are exact."""
    ids, tau = prompt(30, [2, 20]), 1e3
    cache = KVCache(llava.config, replace(VISUAL, key_bits=8, value_bits=8, tau1=0.0, tau2=tau))
    inputs = {"input_ids": ids} | pixels(ids)
    llava(**inputs, past_key_values=cache)
    step = random_ids(1, 1, seed=5)
    seen = []

    def attend_and_record(store, queries, *rest, **more):
        seen.append((queries, attend(store, queries, *rest, **more)))
        return seen[-1][1]

    monkeypatch.setattr(attend_module, "attend", attend_and_record)
    llava(step, past_key_values=cache)
    queries, output = seen[0]
    exact = DynamicCache()
    with_eager(llava, lambda: llava(**inputs, past_key_values=exact))
    with_eager(llava, lambda: llava(step, past_key_values=exact))
    keys, values = (x[0].repeat_interleave(2, 0) for x in (exact.layers[0].keys, exact.layers[0].values))
    scores = (queries[0] @ keys.transpose(1, 2)) * 16**-0.5
    visual = torch.nn.functional.pad(ids[0] == IMAGE, (0, 1))
    scores[..., visual] = scores[..., visual].amin(-1, keepdim=True)
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close(output[0], expected, rtol=0.02, atol=0.02)
    assert cache.layers[0].store.clamped_rows == 4


def test_layers_of_other_modalities_ignore_the_mask(llava):
    ids, cache = prompt(30, [2, 20]), KVCache(llava.config, [VISUAL, SPAN])
    llava.generate(ids, **pixels(ids), past_key_values=cache, max_new_tokens=3, **GREEDY)
    assert [len(positions(cache, 0, layer)[0][0]) for layer in (0, 1)] == [8, 30]


def test_figures_count_spans_and_full_precision_tokens(llava):
    ids, cache = prompt(30, [2, 20]), KVCache(llava.config, VISUAL)
    llava(ids, **pixels(ids), past_key_values=cache)
    cache.seal()
    stats = cache.stats()
    assert (stats.tokens, stats.residual_tokens) == (30, 22)
    # Two layers, K and V, two heads of 16 channels: 22 tokens in float32, a block of 128 codes of 2 bits, scales.
    assert stats.bytes_used == 2 * 2 * 2 * (16 * (22 * 4) + 16 * 128 * 2 // 8 + 16 * 4)


def test_a_copied_cache_and_its_original_go_on_alike(llava):
    ids, cache = prompt(30, [2, 20]), KVCache(llava.config, VISUAL)
    llava(ids, **pixels(ids), past_key_values=cache)
    other = copy.deepcopy(cache)
    step = random_ids(1, 1)
    assert torch.equal(llava(step, past_key_values=cache).logits, llava(step, past_key_values=other).logits)
    assert positions(cache) == positions(other)


# --- by hand, and refusals


def test_a_modality_mask_set_by_hand_selects_the_span():
    model = ARCHITECTURES["llava"].build("kvconvert")
    ids, cache = prompt(30, [2, 20]), KVCache(model.config, VISUAL)
    cache.set_modality_mask(ids == IMAGE, "visual")
    model(ids, **pixels(ids), past_key_values=cache)
    cache.seal()
    assert positions(cache)[0] == [[2, 3, 4, 5, 20, 21, 22, 23]]
    with pytest.raises(CacheError, match="has no modality mask"):  # masks are of one forward pass
        model(random_ids(1, 30), past_key_values=cache)


def test_a_prompt_without_a_modality_mask_is_refused(llava):
    ids = random_ids(1, 10)
    embeddings = llava.get_input_embeddings()(ids)
    with pytest.raises(CacheError, match="inputs_embeds alone are not enough"):
        llava(inputs_embeds=embeddings, past_key_values=KVCache(llava.config, VISUAL))
    with pytest.raises(CacheError, match="inputs_embeds alone are not enough"):
        llava.generate(inputs_embeds=embeddings, past_key_values=KVCache(llava.config, VISUAL), max_new_tokens=2)
    unwatched = ARCHITECTURES["llava"].build("kvconvert")
    with pytest.raises(CacheError, match="watch_inputs"):
        unwatched(ids, past_key_values=KVCache(llava.config, VISUAL))


def test_masks_of_another_input_are_refused(llava):
    cache = KVCache(llava.config, VISUAL)
    cache.set_modality_mask(torch.zeros(1, 12, dtype=torch.bool), "visual")
    with pytest.raises(CacheError, match=r"\[1, 12\], but 1 sequences of 10 tokens arrived"):
        llava.model.language_model(random_ids(1, 10), past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "scheme", "words"), [("llama", VISUAL, "no image or video token"), ("llava", AUDIBLE, "no audio token")]
)
def test_a_config_without_such_tokens_is_refused_when_the_cache_is_made(name, scheme, words):
    with pytest.raises(UnsupportedModelError, match=words):
        KVCache(ARCHITECTURES[name].config(), scheme)
    with pytest.raises(UnsupportedModelError, match="whole model"):
        KVCache(ARCHITECTURES[name].config().get_text_config(), scheme)


def test_ids_of_images_and_videos_are_found_also_in_nested_configs():
    from transformers import Qwen2_5OmniConfig

    thinker = ARCHITECTURES["qwen2_5_omni_thinker"].config().to_dict()
    config = Qwen2_5OmniConfig(thinker_config=thinker)
    cache = KVCache(config, [VISUAL, AUDIBLE])
    assert cache.placeholders == {"audio": (AUDIO,), "visual": (IMAGE, VIDEO)}


def test_a_module_without_ids_or_cache_cannot_be_watched(llava):
    with pytest.raises(UnsupportedModelError, match=f"takes no input_ids and no {CACHE}"):
        watch_inputs(llava.model.vision_tower)


@pytest.mark.parametrize("preset", ["oscar", "minikv"])
def test_page_schemes_have_no_modality(preset):
    with pytest.raises(RecipeError, match="only spans hold those of one modality"):
        replace(KVScheme.preset(preset), modality="visual")
