import io
import json
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.config import DataConfig
from longtail.data.augment import build_transform
from longtail.data.loading import in_order, load
from longtail.data.parquet import read_parquet
from longtail.data.splits import open_splits
from longtail.errors import UserError

ANY = DataConfig()
CLEAN = build_transform(["resized-crop"], (0.5,) * 3, (0.25,) * 3, image_size=12)
NAMES = ["robin", "wren", "owl"]


def encoded(seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def write(path, images, labels, *, named=True, **options):
    """A file as the hub has it; images are bytes, or dictionaries with bytes and path."""
    table = pa.table({"image": images, "label": labels})
    if named:
        features = {"label": {"names": NAMES, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **options)


@pytest.fixture
def birds(tmp_path, monkeypatch):
    """Two training files and a test file."""
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "birds"
    folder.mkdir()
    for part, labels in enumerate(([0, 0, 0, 1, 0], [1, 2, 0])):
        cells = [{"bytes": encoded(10 * part + n), "path": f"{part}-{n}.png"} for n in range(len(labels))]
        write(folder / f"train-0000{part}-of-00002.parquet", cells, labels, row_group_size=2)
    write(folder / "test-00000-of-00001.parquet", [{"bytes": encoded(50), "path": None}], [2])
    return folder


def pixels_of(images, **options):
    batches = list(load(images, CLEAN, in_order(len(images), 3), **options))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def test_a_folder_as_the_hub_has_it(birds):
    splits = open_splits(DataConfig(data="parquet", root=str(birds), validation=0))
    assert splits.train.class_names == tuple(NAMES)
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 0, 1, 2, 0]
    assert splits.test.labels.tolist() == [2]
    pixels, _ = pixels_of(splits.train)
    seeds = [0, 1, 2, 3, 4, 10, 11, 12]
    for number, seed in enumerate(seeds):
        picture = CLEAN.decode(Image.open(io.BytesIO(encoded(seed))).convert("RGB"), np.zeros(0))
        expected = CLEAN.normalise(torch.from_numpy(np.array(picture)).permute(2, 0, 1).unsqueeze(0))
        torch.testing.assert_close(pixels[number : number + 1], expected)


def test_labels_need_no_copy_of_the_images(birds, tmp_path):
    assert longtail.distribution(birds).class_counts.tolist() == [5, 2, 1]
    assert longtail.distribution(birds / "train-00001-of-00002.parquet").class_counts.tolist() == [1, 1, 1]
    assert not (tmp_path / "cache").exists()


def test_subsets_and_worker_processes_give_the_same_pixels(birds):
    images = open_splits(DataConfig(data="parquet", root=str(birds), validation=0)).train
    whole, _ = pixels_of(images)
    kept = np.array([6, 1, 7])
    part, labels = pixels_of(images.subset(kept), workers=2)
    assert torch.equal(part, whole[kept])
    assert labels.tolist() == [2, 0, 0]


def test_files_below_data_and_other_columns(birds, tmp_path):
    (tmp_path / "repository").mkdir()
    shutil.copytree(birds, tmp_path / "repository" / "data")
    assert longtail.distribution(tmp_path / "repository").total == 8
    table = pa.table({"img": [encoded(0, "JPEG")], "fine_label": ["ant"], "other": [1.0]})
    pq.write_table(table, tmp_path / "one.parquet")
    images = read_parquet([tmp_path / "one.parquet"], tmp_path, ANY).images
    assert images.class_names == ("ant",)
    assert pixels_of(images)[0].shape == (1, 3, 12, 12)


def test_images_beside_the_file(birds, tmp_path):
    Image.new("RGB", (9, 9), (255, 0, 0)).save(tmp_path / "red.png")
    write(tmp_path / "x.parquet", [{"bytes": None, "path": "red.png"}, {"bytes": None, "path": "no.png"}], [0, 1])
    images = read_parquet([tmp_path / "x.parquet"], tmp_path, ANY).images
    assert images.open(0).getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(UserError, match=r"x.parquet/row 1 is missing"):
        images.open(1)


def test_broken_images_are_named_by_file_and_row_or_skipped(birds):
    path = birds / "train-00001-of-00002.parquet"
    write(path, [encoded(1), b"not a picture", encoded(2)], [1, 2, 0], row_group_size=2)
    first = birds / "train-00000-of-00002.parquet"
    write(first, [encoded(1)] * 5, [0, 0, 0, 1, 0])
    with pytest.raises(UserError, match=r"train-00001-of-00002.parquet/row 1 cannot be read: it is not an image"):
        pixels_of(read_parquet([first, path], birds, ANY).images)
    _, labels = pixels_of(read_parquet([first, path], birds, DataConfig(skip_broken=True)).images)
    assert labels.tolist() == [0, 0, 0, 1, 0, 1, 0]


def test_a_changed_file_is_copied_again(birds):
    path = birds / "test-00000-of-00001.parquet"
    before, _ = pixels_of(read_parquet([path], birds, ANY).images)
    write(path, [{"bytes": encoded(51), "path": "longer-name.png"}], [2])
    from longtail.data import parquet as parquetfiles

    parquetfiles._copied.cache_clear()
    after, _ = pixels_of(read_parquet([path], birds, ANY).images)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b""], "kind": [0], "id": [1]}, r"no column 'label'; say .*--label-column NAME \(columns: image, k"),
        ({"data": [b""], "label": [0], "id": [1]}, "no column 'image'; say which it is with --path-column NAME"),
        ({"path": ["a.png", None], "label": [0, 1]}, "row 1: expected a path, found 'None'"),
        ({"path": ["a.png"], "label": [0], "split": ["later"]}, "row 0: the split 'later' is none of train"),
        ({"image": [b""], "label": [0.5]}, "neither whole numbers nor names"),
        ({"image": [b"", b""], "label": [0, None]}, "neither whole numbers nor names, or some are missing"),
        ({"image": [b""], "label": [-1]}, r"row 0: label -1 is outside 0\.\."),
    ],
)
def test_mistakes_in_columns_are_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=message):
        read_parquet([tmp_path / "train.parquet"], tmp_path, ANY)


def test_without_pyarrow_one_line_says_what_to_install(birds, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["distribution", str(birds)]) == 2
    assert capsys.readouterr().err == "longtail: Parquet files need pyarrow: pip install 'longtail[parquet]'\n"
