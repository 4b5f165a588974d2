"""What the benchmarks convert is a recipe of this version."""

import kv_calibration
import methods
import pytest

from kvconvert import KVScheme, Recipe


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_method_of_the_table_is_a_recipe(name, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(f'[weights]\nmethod = "none"\n\n[kv]\n{methods.METHODS[name]}')
    assert Recipe.load(str(file)).kv is not None


@pytest.mark.parametrize("suite", kv_calibration.SUITES)
def test_a_case_of_the_calibration_benchmark_is_a_scheme(suite):
    cases = kv_calibration.SUITES[suite]()
    assert cases
    assert all(isinstance(scheme, KVScheme) for scheme, *_ in cases.values())
