"""A missing extra is answered by the pip command that installs it."""

import sys

import pytest
from packaging.requirements import Requirement
from test_dependencies import OPTIONAL, declared

from dschat_ppo.common.extras import EXTRAS, how_to_install, is_installed, require_extra
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("module", sorted(EXTRAS))
def test_a_missing_package_is_answered_by_the_command_that_installs_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert not is_installed(module)
    with pytest.raises(UserError) as problem:
        require_extra(module, "--some_flag")
    package, command = EXTRAS[module][0], how_to_install(module)
    assert str(problem.value) == f"--some_flag needs the package {package}: {command}"
    extra, (required, optional) = command.partition("[")[2].partition("]")[0], declared()
    installed = {Requirement(text).name for text in (optional[extra] if extra else required)}
    assert package in installed, f"{command} does not install {package}"
    assert set(EXTRAS) >= OPTIONAL
