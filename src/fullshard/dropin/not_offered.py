"""What programs get for a name of torch's engine that they import and may never use."""

from __future__ import annotations

from typing import Any, NoReturn, Union

from fullshard.dropin.errors import NotOfferedError

__all__ = ["NotOffered"]


class NotOffered:
    """In the place of a class or function that fullshard does not have. Whatever is done with it raises.

    It may be imported, kept, compared and named in annotations.

    Args:
        name: Qualified, as torch has it.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise NotOfferedError(
            f"{self._name} is a part of torch's FSDP that fullshard does not have, and was used; docs/dropin.md says "
            "what there is, fullshard.dropin.uninstall() gives torch's back"
        )

    __call__ = __setattr__ = __instancecheck__ = __subclasscheck__ = __mro_entries__ = _raise
    __iter__ = __getitem__ = __reduce_ex__ = _raise

    def __getattr__(self, name: str) -> Any:
        """Anything but what Python itself looks for on every object."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._raise()

    def __or__(self, other: Any) -> Any:
        """In an annotation."""
        return Union[self, other]  # noqa: UP007 # which is what that means

    def __ror__(self, other: Any) -> Any:
        """In an annotation."""
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        """Its name, and that it is not there."""
        return f"<{self._name}, which fullshard does not have>"
