import pytest
from fake_model import FakeModel

from kvconvert.errors import UsageError
from kvconvert.runtime import Engine


@pytest.mark.parametrize("whole_prompts", [False, True])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 511, 512, 600])
@pytest.mark.parametrize(("pages", "positions"), [(4, 4096), (4, 400), (None, 400)])
def test_what_has_room_is_taken_and_one_token_more_is_refused(pages, positions, length, whole_prompts):
    engine = Engine(FakeModel(max_positions=positions), kv_memory=pages)
    engine._steps._whole_prompts = whole_prompts
    room = engine.room(length)
    if room > 0:
        engine.add([1] * length, max_new_tokens=room)
    with pytest.raises(UsageError, match=r"do not fit|pages"):
        engine.add([1] * length, max_new_tokens=max(room, 0) + 1)


def test_nothing_limits_a_growing_cache_of_a_model_without_positions():
    assert Engine(FakeModel(max_positions=None)).room(10**6) is None
