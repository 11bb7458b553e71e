import os
import signal
import subprocess
import sys
import textwrap

import pytest

from pipetune.errors import InputError, StudyConflictError
from pipetune.storage.folder import StudyFolder

HOLDER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from pipetune.storage.folder import StudyFolder

    with StudyFolder(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
""")

TAKER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from pipetune.errors import StudyConflictError
    from pipetune.storage.folder import StudyFolder

    try:
        with StudyFolder(Path(sys.argv[1])):
            print("taken")
    except StudyConflictError as error:
        print(error)
""")


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "study")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_is_made_where_it_is_missing(tmp_path):
    with StudyFolder(tmp_path / "a" / "b") as folder:
        assert folder.path.is_dir()


def test_a_second_process_is_told_that_the_folder_is_in_use(tmp_path):
    # GIVEN a folder that this process has
    path = tmp_path / "study"
    with StudyFolder(path):
        # WHEN another process wants it
        told = subprocess.run([sys.executable, "-c", TAKER, str(path)], capture_output=True, text=True, check=True)
    # THEN it is refused at once, with the remedies
    assert told.stdout == (
        f"study folder {path} is in use by another pipetune; wait for it, or choose another folder with --study-dir\n"
    )


def test_the_same_process_cannot_have_it_twice(tmp_path):
    with StudyFolder(tmp_path), pytest.raises(StudyConflictError), StudyFolder(tmp_path):
        pass


def test_a_killed_holder_holds_nothing(tmp_path, holder):
    # GIVEN a holder that gets no chance to clean up
    with pytest.raises(StudyConflictError), StudyFolder(tmp_path / "study"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    # THEN the folder is free
    with StudyFolder(tmp_path / "study") as folder:
        assert folder.path.is_dir()


def test_the_lock_is_free_after_use(tmp_path):
    with StudyFolder(tmp_path):
        pass
    told = subprocess.run([sys.executable, "-c", TAKER, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout == "taken\n"


def test_an_error_inside_frees_the_lock_and_gets_out(tmp_path):
    with pytest.raises(ZeroDivisionError), StudyFolder(tmp_path):
        raise ZeroDivisionError
    with StudyFolder(tmp_path) as folder:
        assert folder.path == tmp_path


def test_optunas_lock_of_a_killed_run_is_removed(tmp_path):
    stale = tmp_path / "study.journal.lock"
    stale.touch()
    with StudyFolder(tmp_path):
        assert not stale.exists()


def test_a_refused_process_leaves_optunas_lock_alone(tmp_path):
    # GIVEN a running study in the middle of a write
    with StudyFolder(tmp_path):
        held = tmp_path / "study.journal.lock"
        held.touch()
        # WHEN another is refused
        with pytest.raises(StudyConflictError), StudyFolder(tmp_path):
            pass
        # THEN the write is still protected
        assert held.exists()


def test_a_file_in_the_folders_place_is_bad_input(tmp_path):
    (tmp_path / "study").write_text("I am a file")
    with pytest.raises(InputError, match=r"study folder .*/study: File exists; choose another with --study-dir"):
        StudyFolder(tmp_path / "study").__enter__()
