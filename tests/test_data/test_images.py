"""Image data becomes samples without padding in which no image is cut, or a sentence that says why not."""

import base64
import io
import json
import os
import re
import shutil
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from tiny.media import IMAGE
from tiny.models import ARCHITECTURES
from tiny.processors import LOADABLE, quick_and_full, write_vision_model
from transformers.utils import is_torchvision_available

from kvconvert.data import images
from kvconvert.data.drawings import draw
from kvconvert.data.images import directory_documents, read_image, row_document, too_many_scans
from kvconvert.data.samples import holds_images, load_image_samples, load_samples
from kvconvert.errors import DataError, UsageError
from kvconvert.io.tensorfile import Mapped
from kvconvert.models.processors import load_processor
from kvconvert.models.source import open_source


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """The same model without a chat template."""
    directory = shutil.copytree(model, tmp_path_factory.mktemp("plain") / "model")
    (directory / "chat_template.jinja").unlink()
    return directory


@pytest.fixture
def pictures(tmp_path):
    """Six drawings with captions in text files."""
    directory = tmp_path / "pictures"
    directory.mkdir()
    for index in range(6):
        drawing = draw(9, index)
        Image.fromarray(drawing.image).save(directory / f"{index}.png")
        (directory / f"{index}.txt").write_text(drawing.caption)
    return directory


def samples(model, source, count=2, length=96, seed=0):
    return load_samples(open_source(str(model)), None if source is None else str(source), count, length, seed)


def text_of(model, ids):
    """A sample's text, each image as one token."""
    text = load_processor(model).tokenizer.decode(ids)
    while "<image><image>" in text:
        text = text.replace("<image><image>", "<image>")
    return text


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize("name", quick_and_full(LOADABLE, "llava_next", "qwen3_vl"))
def test_every_processor_gives_whole_samples_that_its_model_takes(name, tmp_path):
    source = open_source(str(write_vision_model(tmp_path, name)))
    data = load_samples(source, None, 3, 128, seed=0)
    assert data.ids.shape == data.visual.shape == (3, 128)
    assert torch.equal(data.visual, data.ids == IMAGE)
    assert data.info.images >= 3
    model = ARCHITECTURES[name].build()
    for ids, extra in zip(data.ids, data.extras, strict=True):
        # The models themselves refuse other numbers of image tokens than of image features.
        assert model(input_ids=ids[None], **extra).logits.isfinite().all()


def test_equal_arguments_give_equal_samples_and_pixels_are_part_of_the_fingerprint(model, pictures):
    data = samples(model, pictures)
    again = samples(model, pictures)
    assert torch.equal(data.ids, again.ids)
    assert data.info == again.info
    assert samples(model, pictures, seed=1).info.sha256 != data.info.sha256
    for index in range(6):
        Image.new("RGB", (96, 96), (index, 90, 200)).save(pictures / f"{index}.png")
    changed = samples(model, pictures)
    assert torch.equal(changed.ids, data.ids)
    assert changed.info.sha256 != data.info.sha256


def test_drawings_are_the_default_and_the_length_is_what_an_image_needs(model):
    data = samples(model, None, length=None)
    assert (data.info.source, data.info.length) == ("kvconvert:drawings", 512)
    text = text_of(model, data.ids[0])
    assert text.startswith(f"<image>{draw(0, 0).caption}<|endoftext|>[user]<image>")
    assert f"[assistant]{draw(0, 1).questions[0].answer}" in text


def test_documents_are_separated_once(model):
    text = text_of(model, samples(model, None, count=1, length=256).ids[0])
    assert "<|endoftext|><image>" in text
    assert "<|endoftext|><|endoftext|>" not in text


def test_an_image_that_does_not_fit_waits_and_text_fills_its_place(tmp_path):
    # 40 tokens of image in 96, so that a second one never fits beside the first one's caption.
    model = write_vision_model(tmp_path / "m", "internvl")
    processor = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(
        json.dumps(processor | {"crop_to_patches": True, "min_patches": 9, "max_patches": 9})
    )
    data = samples(model, None, count=2, length=96)
    assert data.visual.sum(1).tolist() == [40, 40]
    caption, _, rest = text_of(model, data.ids[0]).partition("<|endoftext|>")
    assert caption.endswith(draw(0, 0).caption)
    assert len(rest) > 10
    assert draw(0, 1).questions[0].text in text_of(model, data.ids[1])


def test_without_a_chat_template_questions_follow_their_image_line_by_line(plain):
    question = draw(0, 1).questions[0]
    assert f"<image>{question.text}\n{question.answer}<|endoftext|>" in text_of(
        plain, samples(plain, None, length=160).ids[0]
    )


def test_a_list_of_captions_goes_before_text_files(model, pictures):
    rows = [{"file_name": f"{index}.png", "caption": f"Number {index}."} for index in range(6)]
    write_rows(pictures / "captions.jsonl", rows)
    text = text_of(model, samples(model, pictures, count=1, length=40).ids[0])
    assert "<image>Number " in text
    assert draw(9, 0).caption not in text


def test_lists_may_lie_in_folders_and_tables_beside_images_are_read_as_rows(model, pictures, tmp_path):
    rows = [{"file_name": f"{index}.png", "caption": f"Number {index}."} for index in range(6)]
    write_rows(pictures / "metadata.jsonl", rows)
    assert "<image>Number " in text_of(model, samples(model, tmp_path, count=1, length=40).ids[0])
    (pictures / "metadata.jsonl").unlink()
    for index in range(6):
        (pictures / f"{index}.txt").unlink()
    write_rows(tmp_path / "train.jsonl", [{"image": f"pictures/{i}.png", "text": f"Row {i}."} for i in range(6)])
    assert "<image>Row " in text_of(model, samples(model, tmp_path, count=1, length=40).ids[0])


@pytest.mark.parametrize("kind", ["path", "bytes", "messages", "placeholders"])
def test_rows_hold_images_in_every_form(model, pictures, tmp_path, kind):
    contents = {index: (pictures / f"{index}.png").read_bytes() for index in range(6)}
    source = tmp_path / "rows.parquet" if kind == "bytes" else tmp_path / "rows.jsonl"
    if kind == "bytes":
        rows = [{"image": {"bytes": contents[i], "path": None}, "text": f"Number {i}."} for i in range(6)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif kind == "path":
        write_rows(source, [{"image": f"pictures/{i}.png", "text": f"Number {i}."} for i in range(6)])
    else:
        inside = kind == "messages"
        rows = []
        for i in range(6):
            part = {"type": "image"} | ({"path": f"pictures/{i}.png"} if inside else {})
            turns = [
                {"role": "user", "content": [part, {"type": "text", "text": "Which?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": f"Number {i}."}]},
            ]
            rows.append({"messages": turns} | ({} if inside else {"images": [f"pictures/{i}.png"]}))
        write_rows(source, rows)
    assert holds_images(str(source))
    data = samples(model, source, count=1, length=40)
    shown = re.findall(r"<image>(?:Which.*?)?Number (\d)", text_of(model, data.ids[0]))
    assert shown
    images = [Image.open(pictures / f"{index}.png") for index in shown]
    expected = load_processor(model).image_processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(data.extras[0]["pixel_values"][: len(shown)], expected)


def test_questions_and_answers_become_a_conversation(model, pictures, tmp_path):
    rows = [{"image": f"pictures/{i}.png", "question": "Which?", "answer": f"Number {i}."} for i in range(6)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert "[user]<image>Which?<|endoftext|>[assistant]Number" in text_of(model, samples(model, source, 1, 40).ids[0])


def test_text_alone_calibrates_a_model_that_sees(model, tmp_path):
    (tmp_path / "book.txt").write_text("A long walk through the town. " * 40)
    data = samples(model, tmp_path / "book.txt", length=32)
    assert (data.info.images, data.extras, data.visual) == (0, (), None)


def test_what_is_wrong_with_image_data_is_one_sentence(model, pictures, tmp_path):
    (pictures / "0.txt").unlink()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.png").write_bytes((pictures / "1.png").read_bytes()[:200])
    (tmp_path / "damaged" / "a.txt").write_text("Nothing.")
    shutil.copytree(pictures, tmp_path / "listed")
    write_rows(tmp_path / "listed" / "captions.jsonl", [{"file_name": "9.png", "caption": "Nine."}])
    shutil.copytree(pictures, tmp_path / "nameless")
    write_rows(tmp_path / "nameless" / "metadata.jsonl", [{"caption": "Nine."}])
    write_rows(tmp_path / "gone.jsonl", [{"image": "gone.png", "text": "Gone."}])
    write_rows(tmp_path / "remote.jsonl", [{"image": "https://example.org/a.png", "text": "Far."}])
    write_rows(tmp_path / "silent.jsonl", [{"image": "pictures/1.png", "label": 3}])
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Both?"}]}
    write_rows(tmp_path / "many.jsonl", [{"messages": [turn], "images": ["pictures/1.png"]}])
    write_rows(tmp_path / "few.jsonl", [{"messages": [turn], "images": ["pictures/1.png"] * 3}])
    expected = {
        "pictures": r"0\.png has no caption; write 0\.txt",
        "damaged": r"a\.png is not an image that can be read",
        "listed": r"names the image 9\.png, which does not exist",
        "nameless": "has no image column",
        "gone.jsonl": r"there is no image .*gone\.png",
        "remote.jsonl": "is on the network",
        "silent.jsonl": "has no text column",
        "many.jsonl": "more images than the row has",
        "few.jsonl": "more images than its messages",
    }
    for name, message in expected.items():
        with pytest.raises(DataError, match=message) as caught:
            samples(model, tmp_path / name, count=4)
        assert "\n" not in str(caught.value), name


@pytest.mark.quick("bytes", "0.txt")
@pytest.mark.parametrize("name", ["captions.jsonl", "0.txt"])
@pytest.mark.parametrize("how", ["bytes", "long"])
def test_captions_that_are_no_text_of_a_size_are_one_sentence(pictures, name, how):
    if name != "0.txt":
        (pictures / "0.txt").unlink()
    with (pictures / name).open("wb") as stream:
        stream.write(b'{"file_name": "1.png", "caption": "caf\xe9"}\n')
        if how == "long":
            stream.truncate(10**13)  # of which the disk holds a block
    with pytest.raises(DataError, match=re.escape(f"{name} ")) as caught:
        list(directory_documents(str(pictures), 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_a_list_of_captions_that_is_no_file_is_none(pictures, kind):
    path = pictures / "captions.jsonl"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    assert len(list(directory_documents(str(pictures), 0))) == 6


def test_images_of_more_bytes_than_any_has_and_archives_that_are_no_files_are_refused(pictures):
    Image.new("RGB", (8, 8)).save(pictures / "large.jpg")
    os.truncate(pictures / "large.jpg", 10**13)
    with pytest.raises(DataError, match=r"large\.jpg has 10,000,000,000,000 bytes, more than 268,435,456"):
        read_image("large.jpg", pictures, "here")
    with pytest.raises(DataError, match="there is no archive /dev/null"):
        read_image("zip://a.png::/dev/null", pictures, "here")


def test_an_image_longer_than_a_sample_and_too_few_images_are_refused(model, pictures):
    with pytest.raises(DataError, match=r"take 4 tokens, more than the 8 of a sample; give a `seq_len` of 256"):
        samples(model, pictures, length=8)
    with pytest.raises(DataError, match=r"holds 6 documents, which make \d samples, but 9 are requested"):
        samples(model, pictures, count=9)
    with pytest.raises(UsageError, match="1,024 positions"):
        samples(model, pictures, length=2048)


def test_an_image_may_be_a_path_bytes_or_in_any_mode(pictures, tmp_path):
    expected = Image.open(pictures / "1.png").convert("RGB").tobytes()
    content = (pictures / "1.png").read_bytes()
    for value in (pictures / "1.png", "1.png", content, {"bytes": content, "path": None}, {"path": "1.png"}):
        assert read_image(value, pictures, "here").tobytes() == expected
    Image.new("LA", (4, 4), (7, 0)).save(tmp_path / "grey.png")
    assert read_image("grey.png", tmp_path, "here").getpixel((0, 0)) == (7, 7, 7)


def test_shades_of_sixteen_bits_are_not_cut_and_those_of_unknown_range_are_refused(tmp_path):
    shades = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    found = np.asarray(read_image("deep.png", tmp_path, "here"))
    assert found[..., 0].tolist() == [[0, 0, 1], [128, 255, 255]]
    assert (found == found[..., :1]).all()
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match="shades of 32 bits"):
        read_image("deep.tif", tmp_path, "here")


def test_images_in_archives_and_data_urls_are_read_or_refused(pictures, tmp_path):
    expected = Image.open(pictures / "1.png").convert("RGB").tobytes()
    content = (pictures / "1.png").read_bytes()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("one.png", content)
    address = f"zip://one.png::{tmp_path / 'all.zip'}"
    assert read_image({"path": address, "bytes": None}, tmp_path, "here").tobytes() == expected
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    assert read_image(url, tmp_path, "here").tobytes() == expected
    with pytest.raises(DataError, match="is not base64"):
        read_image("data:image/png;base64,...", tmp_path, "here")
    for other in (f"zip://gone.png::{tmp_path / 'all.zip'}", f"gzip://x::{tmp_path / 'all.zip'}", "zip://x::/nope"):
        with pytest.raises(DataError, match="cannot be read"):
            read_image(other, tmp_path, "here")


@pytest.mark.parametrize(
    "address",
    [
        "zip://a::http://127.0.0.1:1/a.zip",
        "gzip://::https://127.0.0.1:1/a",
        "zip://a::zip://b::ftp://x/b",
        "zip://a::http://127.0.0.1:1/b::/c",
    ],
)
def test_no_row_has_an_image_fetched(tmp_path, address, monkeypatch):
    monkeypatch.setattr("datasets.utils.file_utils.xopen", lambda *_, **__: pytest.fail("opened"))
    for named in (address, "hf://datasets/a/b/c.png", "zip://c.png::hf://datasets/a/b/c.zip"):
        for folder in (tmp_path, None):
            with pytest.raises(DataError, match="is on the network"):
                read_image(named, folder, "here")


@pytest.mark.parametrize("value", ["a.png", {"path": "a.png", "bytes": None}, "zip://a.png::a.zip"], ids=str)
def test_a_row_of_the_hub_names_no_image_of_this_machine(pictures, monkeypatch, value):
    monkeypatch.chdir(pictures)
    for row in ({"image": value}, {"messages": [{"role": "user", "content": [{"type": "image", "image": value}]}]}):
        with pytest.raises(DataError, match="without holding it"):
            row_document(row | {"text": "a"}, None, None, "row 1")


def test_what_other_programs_would_have_to_read_is_no_image(monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("started Ghostscript"))
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match="is not an image"):
        read_image(content, None, "here")


def test_the_seed_orders_a_directory(pictures):
    orders = {seed: [document.place for document in directory_documents(str(pictures), seed)] for seed in (0, 0, 1)}
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_videos_are_refused_where_torchvision_is_missing(tmp_path):
    processor = load_processor(write_vision_model(tmp_path, "qwen2_vl"))
    with pytest.raises(UsageError, match="pip install torchvision"):
        processor(text=["<video>"], videos=[torch.zeros(2, 3, 28, 28)])


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_says_how_to_install_it(tmp_path):
    with pytest.raises(UsageError, match=r"needs torchvision; run pip install torchvision\.$"):
        load_processor(write_vision_model(tmp_path, "mistral3"))
    with pytest.raises(UsageError, match=r"torchvision, or calibrate with text \(a \.txt file as `data`\)\.$"):
        samples(tmp_path, None)
    (tmp_path / "book.txt").write_text("A long walk through the town. " * 40)
    assert samples(tmp_path, tmp_path / "book.txt", length=32).info.images == 0


def test_images_that_are_too_many_for_memory_are_kept_in_files(model, tmp_path, monkeypatch):
    source = open_source(str(model))
    expected = load_samples(source, None, 3, 200, 0)
    sizes = [sum(value.nbytes for value in extra.values()) for extra in expected.extras]
    monkeypatch.setattr("kvconvert.data.samples.IMAGE_BYTES", sizes[0] + 1)
    copies, copy = [], Mapped.copy
    monkeypatch.setattr(Mapped, "copy", lambda self, tensor: copies.append(tensor.nbytes) or copy(self, tensor))
    found = load_samples(source, None, 3, 200, 0, Mapped.near(tmp_path / "work"))
    assert sum(copies) == sum(sizes[1:]) > 0, "the first sample stays in memory"
    assert found.info == expected.info
    for one, other in zip(found.extras, expected.extras, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_processor_without_its_packages_says_which(model, monkeypatch):
    monkeypatch.setattr("kvconvert.models.processors.is_vision_available", lambda: False)
    with pytest.raises(UsageError, match=r"pip install .\.\[images\]"):
        load_image_samples(None, load_processor(model), ARCHITECTURES["llava"].config(), 1, 64, 0)


def test_a_small_file_of_many_pixels_is_refused_before_it_is_decoded(tmp_path):
    Image.new("1", (9000, 9000)).save(tmp_path / "big.png")
    assert (tmp_path / "big.png").stat().st_size < 20_000
    with pytest.raises(DataError, match="has 9,000 x 9,000 pixels, more than 67,108,864"):
        read_image("big.png", tmp_path, "row 1")


@pytest.mark.parametrize("where", ["column", "messages"])
def test_images_of_one_row_are_bounded_together(tmp_path, monkeypatch, where):
    assert images.MOST_DOCUMENT_PIXELS == 2**27
    monkeypatch.setattr(images, "MOST_DOCUMENT_PIXELS", 100_000)
    Image.new("1", (200, 200)).save(tmp_path / "a.png")
    Image.new("1", (1, 1)).save(tmp_path / "b.png")
    for name, count in (("a.png", 3), ("b.png", 1001)):
        row = {"images": [name] * count, "text": "x"}
        if where == "messages":
            row = {"messages": [{"role": "user", "content": [{"type": "image", "path": name}] * count}]}
        with pytest.raises(DataError, match="row 1 has more than 1,000 images, or they have more than 100,000 pixels"):
            row_document(row, None, tmp_path, "row 1")


@pytest.mark.parametrize(
    "text",
    [
        {"text": "a" * (2**20 + 1)},
        {"question": "a" * 2**19, "answer": "b" * (2**19 + 1)},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a" * (2**20 + 1)}]}]},
    ],
    ids=lambda text: next(iter(text)),
)
def test_the_text_of_one_row_is_bounded(text):
    picture = {"image": Image.new("1", (4, 4))}
    with pytest.raises(DataError, match="row 1 has more than 1,048,576 characters of text; divide it"):
        row_document(picture | text, None, None, "row 1")
    assert row_document(picture | {"text": "a" * 2**20}, None, None, "row 1") is not None


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_a_picture_in_many_scans_is_refused(tmp_path, kind):
    picture = io.BytesIO()
    more = {"append_images": [Image.new("L", (64, 64))], "save_all": True} if kind == "MPO" else {}
    Image.new("L", (64, 64)).save(picture, kind, progressive=True, **more)
    content = picture.getvalue()
    scan = content.find(b"\xff\xda")
    content = content[:scan] + content[scan : scan + 20] * 60 + content[scan:]
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(DataError, match="comes in more than 32 scans"):
        read_image("a.jpg", tmp_path, "row 1")
    assert too_many_scans(Image.open(io.BytesIO(content), formats=["JPEG"]))
