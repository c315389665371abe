"""What the tests of data sets share."""


def sizes(splits):
    """Images of each split that there is."""
    found = {name: getattr(splits, name) for name in ("train", "validation", "test")}
    return {name: len(images) for name, images in found.items() if images is not None}
