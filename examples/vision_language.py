"""Convert the language part of a vision-language model and ask about an image (pip install ".[images]"):

    python examples/vision_language.py examples/reference-vlm OUTPUT IMAGE

calibquant-2bit-visual stores what the image became at 2 bits and leaves text exact; docs/models.md has other choices.
"""

import argparse
import sys
from pathlib import Path

import kvconvert


def main(model: str, output: str, image: str, samples: int = 16) -> str:
    """Convert on the drawings that ship with kvconvert; returns the answer to a question about the image."""
    from PIL import Image

    if not Path(image).is_file():
        sys.exit(f"There is no file {image}; give the path of an image.")
    picture = Image.open(image)  # before minutes of calibration
    work, bundle = Path(output) / "work", Path(output) / "bundle"
    recipe = kvconvert.Recipe.load("calibquant-2bit-visual", {"weights.method": "none"})
    kvconvert.calibrate(model, work, recipe=recipe, samples=samples)
    kvconvert.export(work, bundle, force=True)
    print(f"The bundle is in {bundle}.")
    loaded, processor = kvconvert.load(bundle)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Describe the picture."}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(loaded.dtype)
    cache = loaded.new_kv_cache()
    ids = loaded.generate(**inputs, cache=cache, max_new_tokens=32, do_sample=False)
    print(cache.stats())
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a model, or its id on the Hub")
    parser.add_argument("output", help="directory to write the bundle and its working directory to")
    parser.add_argument("image", help="image file to ask about")
    try:
        print(main(**vars(parser.parse_args())))
    except (kvconvert.KvconvertError, OSError) as error:  # one sentence, without a traceback
        sys.exit(str(error))
