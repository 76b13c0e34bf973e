use super::*;

fn held(path: &Path) -> Placeholder {
    match hold(path).unwrap() {
        HoldResult::Held(held, _) => held,
        other => panic!("{other:?}"),
    }
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

#[test]
fn placeholder_is_removed_after_its_last_user() {
    let directory = tempfile::tempdir().unwrap();
    for name in [".git", ".codex"] {
        let path = directory.path().join(name);
        let first = held(&path);
        assert!(is_one(&path));
        let second = held(&path);
        drop(first);
        assert!(exists(&path), "{name}");
        drop(second);
        assert!(!exists(&path), "{name}");
    }
}

#[test]
fn placeholder_of_git_is_a_link_that_leads_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(".git");
    let _held = held(&path);
    assert!(exists(&path) && !path.exists());
    let written = std::fs::write(&path, "x");
    assert!(written.is_err(), "{written:?}");
}

#[test]
fn placeholder_stays_while_another_program_uses_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(".codex");
    let other = open_directory(directory.path()).unwrap();
    range_lock::share(&other).unwrap();
    drop(held(&path));
    assert!(is_one(&path), "removed although another program uses it");
    drop(other);
    drop(held(&path));
    assert!(!exists(&path));
}

#[test]
fn stale_placeholder_of_every_kind_is_reused_and_removed() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let [socket, link, dir] = [".codex", ".git", ".aws"].map(|name| directory.path().join(name));
    let mode = Mode::from_raw_mode(SOCKET_MODE);
    rustix::fs::mknodat(CWD, &socket, FileType::Socket, mode, 0).unwrap();
    rustix::fs::symlink(LINK_TARGET, &link).unwrap();
    std::fs::create_dir(&dir).unwrap();
    let mode = std::fs::Permissions::from_mode(DIRECTORY_MODE);
    std::fs::set_permissions(&dir, mode).unwrap();
    for path in [socket, link, dir] {
        assert!(is_one(&path), "{path:?}");
        drop(held(&path));
        assert!(!exists(&path), "{path:?}");
    }
}

#[test]
fn hold_leaves_existing_files_and_directories_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    for (name, is_dir) in [("dir", true), ("file", false)] {
        let path = directory.path().join(name);
        if is_dir {
            std::fs::create_dir(&path).unwrap();
        } else {
            std::fs::write(&path, "x").unwrap();
        }
        assert!(matches!(hold(&path).unwrap(), HoldResult::Exists), "{name}");
        assert!(path.exists());
    }
    let link = directory.path().join("link");
    std::os::unix::fs::symlink("/", &link).unwrap();
    assert!(matches!(hold(&link).unwrap(), HoldResult::Exists));
    assert!(matches!(
        hold(&link.join("x")).unwrap(),
        HoldResult::Impossible
    ));
    let replaced = directory.path().join(".codex");
    let held = held(&replaced);
    std::fs::remove_file(&replaced).unwrap();
    std::fs::write(&replaced, "x").unwrap();
    drop(held);
    assert_eq!(std::fs::read(&replaced).unwrap(), b"x");
}

#[test]
fn hold_fails_while_another_program_keeps_the_directory_locked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(".codex");
    let other = open_directory(directory.path()).unwrap();
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    let error = hold(&path).unwrap_err().to_string();
    assert!(error.contains("locked (flock)"), "{error}");
    assert!(!exists(&path));
    rustix::fs::flock(&other, FlockOperation::Unlock).unwrap();
    let held = held(&path);
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    drop(held);
    assert!(is_one(&path), "removed without the lock");
    drop(other);
    // The next user of the directory removes it.
    drop(held_in(&directory, ".agents"));
    assert!(!exists(&path));
}

fn held_in(directory: &tempfile::TempDir, name: &str) -> Placeholder {
    held(&directory.path().join(name))
}

#[test]
fn without_locks_only_placeholders_of_this_program_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let without_locks = || {
        let mut table = PlaceholderTable::default();
        let mut opened = PlaceholderDirectory::open(directory.path()).unwrap();
        opened.has_locks = false;
        table
            .directories
            .insert(directory.path().to_owned(), opened);
        table
    };
    let path = directory.path().join(".codex");
    let (mut one, mut other) = (without_locks(), without_locks());
    let held = one.hold(&path).unwrap();
    assert!(matches!(held, Some(HoldResult::Held(..))));
    let error = other.hold(&path).unwrap_err().to_string();
    assert!(error.contains("has no locks"), "{error}");
    assert!(is_one(&path));
    assert!(one.release(&path) && one.sweep(&path));
    assert!(!exists(&path));
    let held = without_locks().hold(&path).unwrap();
    assert!(matches!(held, Some(HoldResult::Held(..))));
}

#[test]
fn nothing_is_held_if_the_journal_cannot_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(".codex");
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut table = PlaceholderTable {
        journal: Some(full.into()),
        ..PlaceholderTable::default()
    };
    let error = table.hold(&path).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NOSPC));
    assert!(!exists(&path));
}
