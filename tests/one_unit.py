"""Several C++ files as one: a compiler reads torch's headers, most of its work for each of them, once."""

from pathlib import Path


def one_unit(sources: list[Path], path: Path) -> Path:
    """Writes to `path` a file that includes these. A file that is unchanged is not written again.

    What a file forgets to include is not seen if another includes it: that is for a compiler of each file alone.
    """
    text = "".join(f'#include "{source}"\n' for source in sources)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path
