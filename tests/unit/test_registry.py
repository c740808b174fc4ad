from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from diffulex.utils.registry import Registry, did_you_mean, load_target


class Base:
    pass


class Abstract(ABC):
    @abstractmethod
    def run(self) -> None: ...


class Lazy(Base):
    pass


@pytest.fixture
def registry() -> Registry[Base]:
    made: Registry[Base] = Registry("scheduler", Base)

    @made.register("multi_bd")
    class Known(Base):
        pass

    made.register("d2f")(type("Other", (Base,), {}))
    return made


def test_a_registered_class_is_returned_unchanged_and_found(registry: Registry[Base]) -> None:
    class Mine(Base):
        value = 7

    assert registry.register("mine")(Mine) is Mine
    assert registry.get("mine") is Mine
    assert registry.names() == ("d2f", "mine", "multi_bd")
    assert "mine" in registry
    assert "yours" not in registry
    assert len(registry) == 3


def test_a_wrong_name_is_answered_with_the_nearest_and_all_known(registry: Registry[Base]) -> None:
    with pytest.raises(
        ValueError, match="no scheduler 'multi-bd'; did you mean 'multi_bd'\\? known: d2f, multi_bd"
    ):
        registry.get("multi-bd")
    with pytest.raises(ValueError, match="no scheduler 'zzz'; known: d2f, multi_bd"):
        registry.get("zzz")
    with pytest.raises(ValueError, match="no empty 'x'; known: none"):
        Registry("empty", Base).get("x")


def test_a_second_class_of_one_name_raises_naming_both(registry: Registry[Base]) -> None:
    class Second(Base):
        pass

    with pytest.raises(
        ValueError, match=r"scheduler 'multi_bd' is .*Known already, so .*Second needs another name"
    ):
        registry.register("multi_bd")(Second)
    assert registry.get("multi_bd").__name__ == "Known"


def test_a_class_of_the_wrong_base_raises_when_registered(registry: Registry[Base]) -> None:
    with pytest.raises(TypeError, match=r"scheduler 'x' must derive from .*\.Base, got builtins\.int"):
        registry.register("x")(int)
    assert "x" not in registry


def test_an_empty_name_is_refused(registry: Registry[Base]) -> None:
    with pytest.raises(ValueError, match="a scheduler needs a name, got ''"):
        registry.register("")(Lazy)


def test_a_lazy_target_is_imported_at_first_use(registry: Registry[Base]) -> None:
    registry.register_lazy("lazy", f"{__name__}:Lazy")
    assert registry.get("lazy") is Lazy
    assert registry.get("lazy") is Lazy


def test_a_lazy_target_of_the_wrong_base_raises_at_first_use(registry: Registry[Base]) -> None:
    registry.register_lazy("wrong", "pathlib:Path")
    with pytest.raises(TypeError, match=r"scheduler 'wrong' must derive from .*Base, got pathlib\.Path"):
        registry.get("wrong")


def test_a_failing_import_of_a_lazy_target_is_not_hidden(registry: Registry[Base]) -> None:
    registry.register_lazy("gone", "diffulex.no_such_module:X")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("gone")
    registry.register_lazy("absent", "pathlib:NoSuchClass")
    with pytest.raises(ValueError, match="module pathlib has no 'NoSuchClass'"):
        registry.get("absent")


def test_a_lazy_target_needs_module_and_class(registry: Registry[Base]) -> None:
    with pytest.raises(ValueError, match="a lazy scheduler reads 'module:Class', got 'pathlib' for 'x'"):
        registry.register_lazy("x", "pathlib")
    with pytest.raises(ValueError, match="a lazy target reads 'module:Name'"):
        load_target(":x")


def test_the_base_may_be_abstract() -> None:
    made: Registry[Abstract] = Registry("thing", Abstract)

    @made.register("real")
    class Real(Abstract):
        def run(self) -> None: ...

    assert made.get("real") is Real


def test_names_that_are_far_off_give_no_hint() -> None:
    assert did_you_mean("block_siz", ["block_size", "page_size"]) == "; did you mean 'block_size'?"
    assert did_you_mean("zzz", ["block_size"]) == ""
