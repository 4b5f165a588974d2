"""Pictures in conversations: what the model's processor makes of them reaches the model, and what cannot is refused."""

import base64
import io
import struct
import zlib

import openai
import pytest
from PIL import Image
from serving import NAME, serving
from test_cli import test_generate_images as vision
from test_report.chromium import EXECUTABLE, chromium
from test_serve_page import shown
from tiny.models import GREEDY
from tiny.processors import write_vision_model

from kvconvert import load
from kvconvert.data.drawings import draw
from kvconvert.serve import app
from kvconvert.serve.images import LONGEST_SIDES, read_images
from kvconvert.serve.page import BundleFacts
from kvconvert.serve.refusal import Refusal
from kvconvert.serve.requests import Limits

NEW = 8


def data_url(image, kind="png", **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"


def part(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


@pytest.fixture(scope="module")
def drawings():
    return [Image.fromarray(draw(3, index).image) for index in (1, 2)]


@pytest.fixture(scope="module", params=["qwen2_vl", pytest.param("llava", marks=pytest.mark.full)])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_vision_model(folder / "model", request.param)
    bundle = vision.converted(folder)
    return bundle, *load(bundle)


@pytest.fixture(scope="module")
def here(loaded):
    bundle, model, processor = loaded
    facts = BundleFacts.of(str(bundle), model.config)
    with serving(model, processor, limits=Limits(images=3, image_pixels=60_000), of_service={"facts": facts}) as here:
        yield here


@pytest.fixture
def requests(here, monkeypatch):
    """The requests that the engine was given, as they come."""
    made, add = [], here.engine.add
    monkeypatch.setattr(here.engine, "add", lambda *given, **options: made.append(add(*given, **options)) or made[-1])
    return made


def generated(loaded, messages, images):
    """What `generate` says of the same, through the processor itself."""
    _, model, processor = loaded
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt").to(dtype=model.dtype)
    count = inputs["input_ids"].shape[1]
    end = GREEDY | {"eos_token_id": model.generation_config.eos_token_id}
    return count, model.generate(**inputs, max_new_tokens=NEW, **end)[0, count:].tolist()


def test_answers_are_those_of_generate_with_the_processor(loaded, here, drawings, requests):
    messages = [
        user("See", part(data_url(drawings[0])), "What is it?"),
        {"role": "assistant", "content": "A disc."},
        user(part(data_url(drawings[1], "webp", lossless=True), detail="auto"), "And this?"),
    ]
    plain = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A disc."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
    ]
    plain[0]["content"].append({"type": "text", "text": "What is it?"})
    client = here.client()
    options = {"model": NAME, "temperature": 0, "max_tokens": NEW}
    answer = client.chat.completions.create(messages=messages, n=2, seed=1, **options)
    count, tokens = generated(loaded, plain, drawings)
    assert answer.usage.prompt_tokens == count
    assert [request.tokens for request in requests] == [tokens, tokens]
    swapped = [messages[0] | {"content": messages[2]["content"][:1] + messages[0]["content"][2:]}]
    client.chat.completions.create(messages=swapped, **options)
    own = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    assert requests[-1].tokens == generated(loaded, own, drawings[1:])[1]
    # Text alone goes as ever, beside a stream about a picture.
    stream = client.chat.completions.create(messages=messages, stream=True, **options)
    client.chat.completions.create(messages=[user("What is it?")], **options)
    assert requests[-1].inputs is None
    assert requests[-1].tokens == generated(loaded, [own[0] | {"content": own[0]["content"][1:]}], [])[1]
    assert len(list(stream)) > 1
    assert requests[-2].tokens == tokens
    here.idle()
    assert not here.service.images._held


def test_the_responses_interface_takes_pictures_too(here, drawings, requests):
    url = data_url(drawings[0])
    items = [{"type": "input_image", "image_url": url, "detail": "low"}, {"type": "input_text", "text": "What?"}]
    client = here.client()
    client.responses.create(
        model=NAME, input=[{"role": "user", "content": items}], temperature=0, max_output_tokens=NEW
    )
    messages = [user(part(url), "What?")]
    client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=NEW)
    assert requests[0].prompt == requests[1].prompt
    assert requests[0].tokens == requests[1].tokens
    status, _, told = here.ask("/v1/responses", {"input": [{"role": "user", "content": [items[0] | {"file_id": "f"}]}]})
    assert (status, "file_id" in told["error"]["message"]) == (400, True)


def test_a_photo_is_seen_as_it_was_held():
    upright = Image.new("RGB", (4, 2), "white")
    upright.putpixel((0, 0), (0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    (seen,) = read_images([data_url(upright, "png", exif=exif)], 100, "messages")
    assert (seen.size, seen.getpixel((1, 0))) == ((2, 4), (0, 0, 0))


PIXEL = "data:image/png;base64,"
REFUSED = [
    (part("https://example.com/a.png"), "the server fetches no image; send it as data:image/png;base64"),
    (part("http://127.0.0.1/a.png"), "the server fetches no image"),
    (part("file:///etc/passwd"), "the server fetches no image"),
    (part("data:image/svg+xml;base64,AAAA"), "an image as data:image/svg+xml;base64 is not served; send it as"),
    ({"type": "image_url", "image_url": "x"}, "no object with a url"),
    ({"type": "image_url"}, "no object with a url"),
    (part(PIXEL, detail="fine"), "may be auto, low or high"),
    (part(PIXEL, other=1), "other is no field"),
    (part(PIXEL + "AA"), "Image 1 cannot be read"),
    (part(PIXEL + "!!!!"), "Image 1 cannot be read"),
    (part(PIXEL + base64.b64encode(b"GIF89a" + bytes(20)).decode()), "it is no PNG, JPEG, or WebP"),
    ({"type": "input_audio"}, "'input_audio' is not served"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_is_no_picture_is_one_sentence(here, given, said):
    status, _, told = here.ask("/v1/chat/completions", {"messages": [user(given)]})
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert said in told["error"]["message"]
    assert "\n" not in told["error"]["message"]


def bomb(width, height):
    """A PNG of few bytes that says it has so many pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return PIXEL + base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([bomb(30_000, 30_000)], "too many pixels"),
        ([bomb(300, 201)], "have 60,300 pixels; this server takes at most 60,000"),
        ([bomb(300, 100)] * 3, "have 90,000 pixels"),
        ([bomb(LONGEST_SIDES * 10 + 1, 10)], "more than 50 times the other"),
        ([bomb(1, 1)] * 4, "has 4 images; this server takes at most 3"),
        ([bomb(20, 20)], "Image 1 is not an image that can be read"),
    ],
)
def test_pictures_have_limits_before_they_are_decoded(here, urls, said):
    status, _, told = here.ask("/v1/chat/completions", {"messages": [user(*map(part, urls))]})
    assert status == 400
    assert said in told["error"]["message"]
    here.idle()


def test_pictures_belong_to_a_user_and_to_a_model_that_sees(converted, here, drawings):
    url = data_url(drawings[0])
    told = here.ask("/v1/chat/completions", {"messages": [user("x"), user(part(url)) | {"role": "assistant"}]})[2]
    assert told["error"]["message"] == "messages.1.content: images belong to a user."
    assert here.ask("/v1/bundle")[2]["images"] is True
    model, tokenizer = load(converted / "bundle")
    with serving(model, tokenizer, of_service={"facts": BundleFacts()}) as blind:
        assert blind.ask("/v1/bundle")[2]["images"] is False
        with pytest.raises(openai.BadRequestError, match="reads text alone, no images") as error:
            blind.client().chat.completions.create(model=NAME, messages=[user(part(url), "What?")])
        assert error.value.code == "unsupported_parameter"


def test_what_waits_with_pictures_has_a_limit_of_memory(here, drawings, monkeypatch):
    monkeypatch.setattr(here.service, "images", app.Bodies(20_000))
    messages = [user(part(data_url(drawings[0])), part(data_url(drawings[1])), part(data_url(drawings[0])))]
    monkeypatch.setattr("kvconvert.serve.places.SMALL_BODY", 1000)
    status, headers, told = here.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert told["error"]["code"] == "too_many_requests"
    here.idle()


def test_a_picture_in_thousands_of_scans_is_refused_before_it_is_decoded(drawings):
    assert read_images([data_url(drawings[0], "jpeg", progressive=True)], 20_000, "messages")
    content = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(content, "jpeg", progressive=True)
    plain = content.getvalue()
    last = plain[plain.rindex(b"\xff\xc4") : -2]  # the last scan, and its table: less than a hundred bytes
    url = PIXEL.replace("png", "jpeg") + base64.b64encode(plain[:-2] + last * 1000 + plain[-2:]).decode()
    with pytest.raises(Refusal, match="Image 1 comes in more than 32 scans; store it as a baseline JPEG"):
        read_images([url], 4_000_000, "messages")


def test_a_refusal_names_its_field():
    with pytest.raises(Refusal) as error:
        read_images([PIXEL + "AA"], 100, "input")
    assert error.value.param == "input"


PICTURE = """(() => {
  const canvas = document.createElement("canvas"), files = new DataTransfer(), input = document.getElementById("files");
  canvas.width = 2000; canvas.height = 1000;
  canvas.toBlob(blob => {
    for (const name of ["a.png", "b.png"]) files.items.add(new File([blob, name], name, { type: "image/png" }));
    input.files = files.files;
    input.dispatchEvent(new Event("change"));
  });
})()"""


@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
def test_the_page_offers_a_picture(loaded, tmp_path):
    bundle, model, processor = loaded
    width, scheme = (1400, "light") if model.config.model_type == "llava" else (420, "dark")
    of_service = {"facts": BundleFacts.of(str(bundle), model.config)}
    limits = Limits(new_tokens=NEW)
    with (
        serving(model, processor, limits=limits, of_service=of_service) as here,
        chromium(tmp_path / "profile") as browser,
    ):
        browser.open(f"http://127.0.0.1:{here.port}/", width, scheme)
        shown(browser, "!document.getElementById('picture').hidden")
        browser.evaluate(PICTURE)
        shown(browser, "document.querySelectorAll('#pictures img').length == 2")
        browser.evaluate("document.querySelector('#pictures button').click()")
        shown(browser, "document.querySelectorAll('#pictures img').length == 1")
        shown(browser, "document.querySelector('#pictures img').naturalWidth == 1024")
        assert browser.evaluate("document.activeElement.id") == "text"
        browser.call("Input.insertText", text="What is it?")
        browser.press("Enter")
        shown(browser, "document.getElementById('cache').textContent.includes('16 bits would take')")
        assert browser.evaluate("document.querySelectorAll('.turn.user img').length") == 1
        assert browser.evaluate("document.getElementById('pictures').hidden")
        assert browser.evaluate("document.querySelector('.turn.user').textContent") == "What is it?"
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
        # It is in the history, with its picture.
        browser.open(f"http://127.0.0.1:{here.port}/", width, scheme)
        shown(browser, "document.getElementById('history').options.length == 2")
        choose = (
            "(h => { h.selectedIndex = 1; h.dispatchEvent(new Event('change')); })(document.getElementById('history'))"
        )
        browser.evaluate(choose)
        shown(browser, "document.querySelectorAll('.turn.user img').length == 1")
        assert browser.console == []


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0", b"Exif\0\0XX*\0\x08\0\0\0", b"\xff" * 20, b""])
def test_a_sound_picture_with_damaged_exif_is_seen_as_it_is_stored(exif):
    for kind in ("png", "jpeg", "webp"):
        (seen,) = read_images([data_url(Image.new("RGB", (4, 2), "white"), kind, exif=exif)], 100, "messages")
        assert seen.size == (4, 2)
