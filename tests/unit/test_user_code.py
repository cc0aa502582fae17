"""Files of the user's that are imported."""

import subprocess
import sys

from spmdrl.config.user_code import import_file


def test_neighbours_of_a_file_replace_no_package_where_a_rank_imports_it(tmp_path):
    """Packages that a rank imports later are those that are installed; a process of user code takes the neighbours."""
    (tmp_path / "tyro.py").write_text("here = True\n")
    (tmp_path / "beside.py").write_text("value = 3\n")
    file = tmp_path / "mine.py"
    file.write_text("import beside\nvalue = beside.value\n")
    program = (
        "import sys\nfrom pathlib import Path\nfrom spmdrl.config.user_code import import_file\n"
        f"assert import_file(Path({str(file)!r}), ahead=sys.argv[1] == 'ahead').value == 3\n"
        "import tyro\nprint(hasattr(tyro, 'here'))"
    )
    for place, found in (("behind", "False"), ("ahead", "True")):
        ended = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True, timeout=60)
        assert ended.stdout.strip() == found, ended.stderr


def test_a_file_is_imported_again_once_it_changed(tmp_path):
    import os

    file = tmp_path / "mine.py"
    file.write_text("value = 1\n")
    first = import_file(file)
    assert import_file(file) is first
    file.write_text("value = 2\n")
    os.utime(file, ns=(1, 1))
    assert import_file(file).value == 2
