"""Placeholder for names of torch's FSDP that programs import and may never use."""

from __future__ import annotations

from typing import Any, NoReturn, Union

from fullshard.dropin.errors import NotOfferedError

__all__ = ["NotOffered"]


class NotOffered:
    """Placeholder for a class or function that fullshard does not have: using it raises ``NotOfferedError``.

    It may be imported, compared and used in annotations.

    Args:
        name: Qualified name in torch.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise NotOfferedError(
            f"{self._name} was used, a part of torch's FSDP that fullshard does not have; "
            "docs/integrations/drop_in.md lists supported names, fullshard.dropin.uninstall() restores torch's"
        )

    __call__ = __setattr__ = __instancecheck__ = __subclasscheck__ = __mro_entries__ = _raise
    __iter__ = __getitem__ = __reduce_ex__ = _raise

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for special names, which Python looks up on every object, else NotOfferedError."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._raise()

    def __or__(self, other: Any) -> Any:
        """Return a union, for annotations."""
        return Union[self, other]  # noqa: UP007 # ``self | other`` would recurse

    def __ror__(self, other: Any) -> Any:
        """Return a union, for annotations."""
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        """Return the name, marked as missing."""
        return f"<{self._name}, which fullshard does not have>"
