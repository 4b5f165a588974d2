"""Saving a loaded bundle: its files are copied as they are, for a bundle is what its manifest describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvconvert.bundle.files import own_files
from kvconvert.bundle.hub import upload
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.writer import copy_file, replacing
from kvconvert.errors import BundleError, UsageError


class SavedAsBundle:
    """Mixed into the class of every model that was loaded from a bundle."""

    bundle_directory: Path

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
        """Copy the verified bundle that this model was loaded from, tokenizer and KV plan included.

        What was changed in the model since it was loaded is not saved. An adapter of PEFT that was added is saved by
        transformers, alone, as for any other model.

        Args:
            save_directory: a new or empty directory, or one with a bundle, which is replaced.
            is_main_process: save nothing in other processes.
            options: of transformers; none of them is possible with a bundle.

        Raises:
            UsageError: an option, or a directory with something else in it.
            BundleError: the bundle's directory changed or is gone.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **options)
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise UsageError(
                f"save_pretrained({given[0]}=...) is not possible with a bundle, whose files are copied as they are; "
                f"leave it out{', and use `kvconvert push`' if given[0] == 'push_to_hub' else ''}."
            )
        target = Path(save_directory)
        if not is_main_process or (target.exists() and target.samefile(self.bundle_directory)):
            return None
        bundle = open_bundle(self.bundle_directory)
        with replacing(target, force=True) as directory:
            for name in sorted(own_files(bundle.manifest)):
                if not (bundle.directory / name).is_file():
                    continue
                copied = copy_file(bundle.directory / name, directory / name)
                if name in bundle.manifest.files and copied != bundle.manifest.files[name]:
                    raise BundleError(f"{name} of {bundle.directory} changed while it was copied; save again.")
        return None

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, **options: Any
    ) -> str:
        """Upload the verified bundle that this model was loaded from, as `kvconvert push` does; returns the commit.

        Raises:
            UsageError: another option of transformers, or see `kvconvert.bundle.hub.upload`.
            BundleError, HubError: the bundle does not verify, or the Hub refuses; see there.
        """
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise UsageError(
                f"push_to_hub({given[0]}=...) is not possible with a bundle; leave it out, or use `kvconvert push`."
            )
        return upload(open_bundle(self.bundle_directory), repo_id, private=bool(private), revision=revision)


def save_as_bundle(model: PreTrainedModel, directory: Path) -> None:
    """Let a model that was loaded from the bundle in `directory` be saved as that bundle."""
    base = type(model)
    model.bundle_directory = directory
    model.__class__ = type(
        base.__name__, (SavedAsBundle, base), {"__module__": base.__module__, "__doc__": base.__doc__}
    )
