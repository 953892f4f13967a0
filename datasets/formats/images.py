"""Images in folders as a source: one folder per class, decoded by Pillow while they are read."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt

from ..arrow import Rows, to_objects
from ..cache import Cache, Cached, CachedFile, Entries, check_fits, version_of
from ..errors import DataError
from ..paths import INDEX, PathLike, absolute, nearest
from ..plan import permutation
from .base import OnBadRow, check_options
from .index_cache import Index, cached_index

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".jfif")
_FRAGMENT_ROWS = 16
# Files that are checked at a time while the index is built.
_CHECKED_AT_A_TIME = 1024
# The key of the fixed order of the files.
_ORDER = 4


@dataclass(frozen=True)
class Images:
    """Images in folders, to be read by a `Stream`, alone or as a part of a mixture. Needs Pillow.

    As in torchvision's `ImageFolder`, every folder in `path` is a class, and images may be in folders inside it. Rows
    have the columns `image`, uint8 [H, W, 3] for mode "RGB" and [H, W] for "L", and `label`, the index of the class in
    sorted order. If all images are in `path` itself, there is no `label`. Images of different sizes become a list,
    unless a transform gives them one size. The id of a row is the path of its file in the folder. The files are in a
    fixed mixed order, because a shuffle permutes groups of neighbours, which would otherwise be of one class.

    Args:
        path: the folder, or its fsspec URI.
        mode: what Pillow converts images to, such as "RGB" or "L"; "F" is float32 [H, W], with the values of images
            that have more than 8 bits per channel.
        apply_exif_orientation: turn photos as their EXIF data say. False gives the pixels as they are stored, as
            torchvision's `ImageFolder` does.
        classes: names of all classes, in the order of their labels; None for the folders that have images.
        on_bad_row: a file that is not an image is an error at the start, and damaged pixels are one when they are read;
            both name the file ("raise"). Or both are left out ("skip"), for which the first start decodes every image.
        index: folder for the index; None puts it into `path`, in `.headway-index`.
        cache: where remote data is kept on a local disk; None reads it remotely in every epoch.

    Example:
        >>> from headway.datasets.formats.images import Images
        >>> from headway.datasets.stream import Stream
        >>> stream = Stream(Images("photos/train", on_bad_row="skip"), readers=4)
    """

    path: PathLike
    mode: str = "RGB"
    classes: Sequence[str] | None = None
    on_bad_row: OnBadRow = "raise"
    index: PathLike | None = None
    cache: Cache | None = None
    apply_exif_orientation: bool = False

    def __post_init__(self) -> None:
        check_options(self.classes, self.on_bad_row, "classes")
        if not isinstance(self.path, str | os.PathLike):
            raise DataError(f"path must be one folder, got {self.path!r}; mix several in a Mixture")
        object.__setattr__(self, "path", absolute(self.path)[0])

    def open(self) -> ImageSource:
        """List the files, and read their index or build it.

        Raises:
            DataError: Pillow is missing or lacks the mode, there are no images, one is damaged, in no class, or would
                be clipped by the mode, or `classes` lacks one.
        """
        pixel_bytes = _pixel_bytes(self.mode)
        entries = None if self.cache is None else self.cache.open()
        folder, names, sizes, versions = self._list()
        check_fits(self.cache, max(sizes), str(self))
        labels = self._labels(names)
        listed = "\0".join(f"{name}\0{size}" for name, size in zip(names, sizes, strict=True))
        key = hashlib.sha256(f"{self.on_bad_row}\0{listed}".encode()).hexdigest()[:16]
        if self.index is None and "://" in str(self):
            raise DataError(f"{self} is remote, so its index needs a local folder: set index='some/folder'")
        place = Path(self.index).expanduser().absolute() if self.index is not None else Path(str(self)) / INDEX
        index = cached_index(
            place / f"images-2.{key}.npz", lambda: self._build(folder, names, sizes, versions, entries)
        )
        bad = dict(index.facts["bad"])
        if bad and self.on_bad_row == "raise":
            name, why = next(iter(bad.items()))
            more = f", and {len(bad) - 1} more files like it" if len(bad) > 1 else ""
            raise DataError(f"{name} in {self} is not an image: {why}{more}. Remove it, or set on_bad_row='skip'")
        for mode, name in index.facts["modes"].items():
            if is_clipped(mode, self.mode):
                raise DataError(
                    f"{name} in {self} has the Pillow mode {mode!r}, whose values mode={self.mode!r} would clip: set "
                    "mode='F', and scale them in a transform"
                )
        good = np.array([name not in bad for name in names])
        if not good.any():
            raise DataError(f"{self} has no image that can be decoded")
        order = np.flatnonzero(good)[permutation(int(good.sum()), _ORDER)]
        turned = "turned\0" if self.apply_exif_orientation else ""
        digest = hashlib.sha256(f"{turned}{self.mode}\0{key}\0{len(bad)}\0{labels}".encode()).hexdigest()[:16]
        return ImageSource(
            path=str(self),
            mode=self.mode,
            names=tuple(names[each] for each in order),
            sizes=tuple(sizes[each] for each in order),
            labels=None if labels is None else np.array(labels, dtype=np.int64)[order],
            skipped_rows=len(bad),
            row_bytes=max(1, int(index.arrays["pixels"][good].mean()) * pixel_bytes),
            fingerprint=digest,
            versions=tuple(versions[each] for each in order) if versions else (),
            entries=entries,
            apply_exif_orientation=self.apply_exif_orientation,
        )

    def _list(self) -> tuple[_Folder, list[str], list[int], list[str]]:
        """Return the folder; the names of the images, relative to it and sorted; sizes; and, for a cache, versions."""
        try:
            folder = _Folder(str(self), *fsspec.core.url_to_fs(str(self)))
            fs, root = folder.fs, folder.root
            if self.cache is not None:
                fs.invalidate_cache()  # A listing of this process may be older than the files.
            found = fs.find(root, detail=True) if fs.isdir(root) else None
        except (ImportError, ValueError, OSError) as error:
            raise DataError(f"cannot read {self}: {type(error).__name__}: {error}") from error
        if found is None:
            raise DataError(f"{self} is not a folder: Images needs one with a folder of images for each class")
        about = {posixpath.relpath(path, root): each for path, each in found.items()}
        # As for other formats, names that begin with a dot or an underscore are metadata.
        names = sorted(
            name
            for name in about
            if name.lower().endswith(SUFFIXES) and not any(part[:1] in "._" for part in name.split("/"))
        )
        if not names:
            there = ", ".join(sorted(about)[:5])
            raise DataError(f"{self} has no file that ends in {', '.join(SUFFIXES)}; there is: {there or 'nothing'}")
        versions = [version_of(about[name], name) for name in names] if self.cache is not None else []
        return folder, names, [int(about[name]["size"]) for name in names], versions

    def _labels(self, names: Sequence[str]) -> list[int] | None:
        outside = [name for name in names if "/" not in name]
        if len(outside) == len(names) and self.classes is None:
            return None
        if outside:
            raise DataError(f"{outside[0]} in {self} is in no folder of a class: move it into one, or remove it")
        folders = [name.partition("/")[0] for name in names]
        classes = {name: label for label, name in enumerate(self.classes or sorted(set(folders)))}
        for folder in folders:
            if folder not in classes:
                raise DataError(f"classes lacks {folder!r}, a folder in {self}; {nearest(folder, classes)}")
        return [classes[folder] for folder in folders]

    def _build(
        self,
        folder: _Folder,
        names: Sequence[str],
        sizes: Sequence[int],
        versions: Sequence[str],
        entries: Entries | None,
    ) -> Index:
        """Read the header of every image, or decode it if damaged ones are left out.

        Raises:
            DataError: a file cannot be read, as when the network fails, which does not say that it is damaged.
        """
        decode = self.on_bad_row == "skip"

        def check(index: int) -> tuple[int, str, str]:
            name, content = names[index], None
            if decode and entries is not None:  # A header is not cached: only whole files are found again.
                cached = Cached(entries, sizes[index], versions[index])
                content = io.BytesIO(_contents(folder.open(name, cached), str(self), name))
            with _Watched(content or folder.open(name)) as file:
                try:
                    return *_header(file, decode=decode), ""
                except DataError as error:
                    if file.error is not None:
                        raise _unreadable(name, str(self), file.error) from file.error
                    return 0, "", str(error)

        checked: list[tuple[int, str, str]] = []
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for first in range(0, len(names), _CHECKED_AT_A_TIME):
                checked += pool.map(check, range(first, min(first + _CHECKED_AT_A_TIME, len(names))))
        pixels = np.array([count for count, _, _ in checked], dtype=np.int64)
        bad = [(name, why) for name, (_, _, why) in zip(names, checked, strict=True) if why]
        # Of each mode, the first image.
        modes = {mode: name for name, (_, mode, _) in reversed([*zip(names, checked, strict=True)]) if mode}
        return Index({"pixels": pixels}, {"bad": bad, "modes": modes})

    def __str__(self) -> str:
        return str(self.path)


class ImageFiles(NamedTuple):
    """A fragment: some image files.

    Attributes:
        path: the folder.
        names, sizes: the files in it, and their sizes in bytes.
        labels: int64; None without classes.
        mode: see `Images`.
        versions: of the files, for the cache; empty without one.
        entries: the cache.
        apply_exif_orientation: see `Images`.
    """

    path: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    labels: npt.NDArray[np.int64] | None
    mode: str
    versions: tuple[str, ...] = ()
    entries: Entries | None = None
    apply_exif_orientation: bool = False

    @property
    def num_rows(self) -> int:
        """Number of images."""
        return len(self.names)

    def take(self, rows: slice | npt.NDArray[np.int64]) -> ImageFiles:
        """Return some of the images, so that the others are not decoded."""
        at = np.arange(self.num_rows)[rows].tolist()
        return self._replace(
            names=tuple(self.names[each] for each in at),
            sizes=tuple(self.sizes[each] for each in at),
            labels=None if self.labels is None else self.labels[rows],
            versions=tuple(self.versions[each] for each in at if self.versions),
        )

    def read(self) -> Rows:
        """Return all images, decoded.

        Raises:
            DataError: a file is missing, has changed or is damaged.
        """
        folder = _Folder(self.path)
        images = [self._read(folder, index) for index in range(len(self.names))]
        same = len({image.shape for image in images}) == 1
        rows: Rows = {"image": np.stack(images) if same else to_objects(images)}
        return rows if self.labels is None else {**rows, "label": self.labels}

    def _read(self, folder: _Folder, index: int) -> npt.NDArray[Any]:
        name, size = self.names[index], self.sizes[index]
        cached = None if self.entries is None else Cached(self.entries, size, self.versions[index])
        data = _contents(folder.open(name, cached), self.path, name)
        if len(data) != size:
            raise DataError(f"{name} in {self.path} has changed since the run started. Start a new run for new data")
        try:
            return _decode(io.BytesIO(data), self.mode, self.apply_exif_orientation)
        except DataError as error:
            raise DataError(
                f"{name} in {self.path} is damaged: {error}. Remove it, or set on_bad_row='skip'"
            ) from error


@dataclass(frozen=True)
class ImageSource:
    """Listed images.

    Attributes:
        path, mode: see `Images`.
        names, sizes: the files, in their fixed order.
        labels: int64; None without classes.
        skipped_rows: images that are left out because they are damaged.
        row_bytes: mean size of an image in memory.
        fingerprint: of the names and sizes of all files, the classes, the mode, and what is left out.
        versions, entries, apply_exif_orientation: see `ImageFiles`.
    """

    path: str
    mode: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    labels: npt.NDArray[np.int64] | None
    skipped_rows: int
    row_bytes: int
    fingerprint: str
    versions: tuple[str, ...] = ()
    entries: Entries | None = None
    apply_exif_orientation: bool = False

    @property
    def rows(self) -> int:
        """Number of images."""
        return len(self.names)

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment."""
        return np.diff(np.append(np.arange(0, self.rows, _FRAGMENT_ROWS), self.rows)).astype(np.int64)

    def fragment(self, index: int) -> ImageFiles:
        """Return a fragment."""
        some = slice(index * _FRAGMENT_ROWS, (index + 1) * _FRAGMENT_ROWS)
        labels = None if self.labels is None else self.labels[some]
        return ImageFiles(
            *(self.path, self.names[some], self.sizes[some], labels, self.mode, self.versions[some], self.entries),
            apply_exif_orientation=self.apply_exif_orientation,
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the path of an image in the folder."""
        return self.names[index * _FRAGMENT_ROWS + row]


def check_pillow() -> None:
    """Raise a `DataError` if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise DataError("images need Pillow: pip install 'headway[images]'") from error


def _pixel_bytes(mode: str) -> int:
    """Return the size of a pixel of a Pillow mode.

    Raises:
        DataError: Pillow is missing, or has no such mode.
    """
    check_pillow()
    from PIL import Image, ImageMode

    if mode not in Image.MODES:
        raise DataError(f"mode={mode!r} is not a mode of Pillow; {nearest(mode, Image.MODES)}")
    found = ImageMode.getmode(mode)
    return len(found.bands) * np.dtype(found.typestr).itemsize


def is_clipped(mode: str, to: str) -> bool:
    """Whether Pillow clips values when it converts one mode to another. Images of 8 bits per channel never are."""
    from PIL import ImageMode

    before, after = (np.dtype(ImageMode.getmode(each).typestr) for each in (mode, to))
    return before.itemsize > 1 and (after.itemsize < before.itemsize or not np.can_cast(before, after, "same_kind"))


class _Folder:
    """A folder of images. It must live as long as its open files: a zip closes them when it is collected.

    Args:
        path: the folder.
        fs, root: where it is; found when it is needed, which is never if all files are in the cache.
    """

    def __init__(self, path: str, fs: Any = None, root: str = "") -> None:
        self.path, self.fs, self.root = path, fs, root

    def open(self, name: str, cached: Cached | None = None) -> Any:
        """Open a file for reading bytes, through the cache if there is one."""
        try:
            if cached is not None:
                return CachedFile(posixpath.join(self.path, name), cached, lambda: self._place(name))
            if "://" not in self.path:
                return open(posixpath.join(self.path, name), "rb")
            fs, inner = self._place(name)
            return fs.open(inner, "rb")
        except Exception as error:  # not every error of a network is an OSError
            raise _unreadable(name, self.path, error) from error

    def _place(self, name: str) -> tuple[Any, str]:
        if self.fs is None:
            _, _, archive = self.path.partition("::")
            version = ""
            if archive:
                fs, inner = fsspec.core.url_to_fs(archive)
                version = fs.ukey(inner)
            self.fs, self.root = _file_system(self.path, version, os.getpid())
        return self.fs, posixpath.join(self.root, name)


@lru_cache(maxsize=4)
def _file_system(path: str, version: str, process: int) -> tuple[Any, str]:
    """Return the file system and the path in it. Cached, because opening a zip reads the names of all its files.

    Args:
        path: the folder.
        version: of the archive: another one is opened again.
        process: one that is forked must not share the position in the file.
    """
    return fsspec.core.url_to_fs(path)  # type: ignore[no-any-return]


class _Watched:
    """A file that keeps the error of a read, to tell a storage that does not answer from a damaged image."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        """Read, and keep an error."""
        try:
            data: bytes = self._file.read(size)
            return data
        except (zipfile.BadZipFile, zlib.error, EOFError):  # damage inside an archive
            raise
        except Exception as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _unreadable(name: str, folder: str, error: Exception) -> DataError:
    return DataError(f"cannot read {name} in {folder}: {type(error).__name__}: {error}")


def _contents(file: Any, folder: str, name: str) -> bytes:
    """Read and close a file of a folder."""
    try:
        with file:
            data: bytes = file.read()
            return data
    except Exception as error:
        raise _unreadable(name, folder, error) from error


def _decode(file: Any, mode: str, apply_exif_orientation: bool) -> npt.NDArray[Any]:
    """Return the pixels of an image.

    Raises:
        DataError: it is damaged.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if apply_exif_orientation:
                ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(image.convert(mode))
    except Exception as error:  # Pillow's plugins raise many types
        raise DataError(_why_undecodable(error)) from error


def _header(file: Any, *, decode: bool) -> tuple[int, str]:
    """Return the number of pixels of an image and its mode, by its header; with `decode`, all of it is decoded as well.

    Raises:
        DataError: it is not an image, or is damaged.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            if decode:
                image.load()
            return image.width * image.height, image.mode
    except Exception as error:
        raise DataError(_why_undecodable(error)) from error


def _why_undecodable(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    # Its message names the Python object that was read.
    unknown = isinstance(error, UnidentifiedImageError)
    return f"{type(error).__name__}: {'Pillow does not know its format' if unknown else error}"
