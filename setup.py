"""Everything about the package is in pyproject.toml, but for two things that it cannot say.

A checkout that cannot be installed is refused. And README's links lead into the repository, wherever that is:
`KVCONVERT_REPOSITORY=https://github.com/OWNER/NAME make dist` writes them out, so that they lead there from the package
index, too.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent

if not ROOT.joinpath("src", "kvconvert", "kernels").is_dir():
    raise SystemExit(
        "This checkout has no symbolic links, which src/kvconvert is; kvconvert needs Linux (on Windows: WSL), where "
        "git makes them: clone it there, with `git config core.symlinks` not set to false."
    )

readme = ROOT.joinpath("README.md").read_text(encoding="utf8")
urls = {}
if repository := os.environ.get("KVCONVERT_REPOSITORY"):
    version = re.search('__version__ = "(.+)"', ROOT.joinpath("src/kvconvert/version.py").read_text(encoding="utf8"))[1]
    readme = re.sub(r"\]\((?!https?://|#)", f"]({repository}/blob/v{version}/", readme)
    readme = re.sub(r'(src|srcset)="(?!https?://)', rf'\1="{repository}/raw/v{version}/', readme)
    urls = {"Repository": repository, "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md"}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
