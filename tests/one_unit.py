"""Several C++ files as one: a compiler reads torch's headers, most of its work for each of them, once."""

import re
from pathlib import Path


def one_unit(sources: list[Path], path: Path) -> Path:
    """Writes to `path` all that the files include, and then each of them, in a namespace where it meets no other.

    Errors name the files and their own lines. What a file forgets to include is not seen if another includes it: that
    is for a compiler of each file alone.
    """
    texts = [source.read_text() for source in sources]
    includes = dict.fromkeys(line for text in texts for line in re.findall(r"^#include .*", text, re.MULTILINE))
    parts = [
        f"namespace file_{number}::memcheck {{\nusing namespace ::memcheck;\n}}\n"
        f'namespace file_{number} {{\n#line 1 "{source}"\n{text}\n}}\n'
        for number, (source, text) in enumerate(zip(sources, texts, strict=True))
    ]
    path.write_text("\n".join([*includes, *parts]))
    return path
