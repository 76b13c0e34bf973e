//! File operations through six backends: in this process, over an in-memory link, over standard
//! input and output, over a unix socket, over a websocket and through a relay.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod subjects;
mod transfers;

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use exec_server::ExecServerError;
use exec_server::fs::{
    AccessOptions, CopyOptions, CreateDirectoryOptions, DirectoryPages, Feature, HashOptions,
    Links, ReadDirectoryOptions, ReadStreamOptions, RemoveOptions, RenameOptions, SearchOptions,
    SetMetadata, TreeWalkOptions, WalkPages, WatchOptions, WriteMode, WriteOptions,
    WriteStreamOptions, child,
};
use exec_server::protocol::fs::{ChangeKind, SearchMatch, WalkKind, WatchIgnore};
use exec_server::protocol::limits::MAX_WATCHES;
use exec_server::protocol::sandbox::{
    EntryPath, FilePermissions, NetworkPermission, PathAccess as Allowed, Permissions, Sandbox,
    SandboxEntry, SpecialPath,
};
use exec_server::protocol::{PathUri, codes};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};

use subjects::FilesSubject;

/// Makes each case a test for every backend.
macro_rules! over_all_subjects {
    ($module:ident: $($name:ident;)*) => {$(
        mod $name {
            crate::over_all_subjects!(@ $module $name: local in_process stdio unix websocket relay);
        }
    )*};
    (@ $module:ident $name:ident: $($subject:ident)*) => {$(
        #[tokio::test]
        async fn $subject() {
            let subject = crate::subjects::$subject().await;
            let limit = std::time::Duration::from_secs(60);
            let done = tokio::time::timeout(limit, crate::$module::$name(subject)).await;
            done.expect("the case should end in time");
        }
    )*};
}
pub(crate) use over_all_subjects;

over_all_subjects! { cases:
    read_file_returns_what_write_file_wrote;
    file_larger_than_a_message_is_streamed;
    file_errors_have_code_and_path;
    symlinks_are_refused_when_requested;
    read_stream_returns_any_range;
    write_stream_replaces_updates_and_truncates;
    dropped_write_stream_leaves_the_file_unchanged;
    write_stream_fails_permanently_after_an_error;
    directories_are_created_listed_and_removed;
    file_names_with_any_bytes_round_trip;
    walk_returns_a_bounded_tree;
    copy_and_rename_move_trees_and_files;
    metadata_is_set_and_returned;
    hash_covers_the_file_or_its_beginning;
    listings_have_any_length;
    sandbox_policy_is_enforced_or_refused;
    policies_bind_every_operation;
    policies_that_cannot_be_resolved_are_refused;
    search_returns_matches_with_context;
    watch_reports_changes_except_ignored_ones;
    watch_missing_reports_a_created_path;
}

/// Bytes without repeated blocks.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    let piece: Vec<u8> = (0..65_521u32)
        .map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0])
        .collect();
    let mut data = Vec::with_capacity(len + piece.len());
    while data.len() < len {
        data.extend_from_slice(&data.len().to_be_bytes());
        data.extend_from_slice(&piece);
    }
    data.truncate(len);
    data
}

mod cases {
    use super::*;

    fn code<T>(outcome: Result<T, ExecServerError>) -> Option<i64> {
        outcome.err().unwrap().code()
    }

    pub(super) async fn read_file_returns_what_write_file_wrote(subject: FilesSubject) {
        let uri = subject.uri("f");
        for len in [0, 1, 4096, 1 << 20, (1 << 20) + 1] {
            let data = pattern(len);
            let written = subject
                .files
                .write_file(&uri, data.clone().into(), Default::default());
            written.await.unwrap();
            assert!(fs::read(subject.path("f")).unwrap() == data, "{len}");
            let read = subject.files.read_file(&uri, Default::default()).await;
            assert!(read.unwrap() == data, "{len}");
        }
        // A replaced file keeps its mode, unless a mode is given.
        fs::set_permissions(subject.path("f"), fs::Permissions::from_mode(0o640)).unwrap();
        for (len, mode, expected) in [
            (3, None, 0o640),
            (2 << 20, None, 0o640),
            (3, Some(0o751), 0o751),
            (2 << 20, Some(0o600), 0o600),
        ] {
            let options = WriteOptions {
                mode,
                modified_at_ms: Some(1_600_000_000_123),
                ..WriteOptions::default()
            };
            let data = pattern(len);
            subject
                .files
                .write_file(&uri, data.into(), options)
                .await
                .unwrap();
            let found = fs::metadata(subject.path("f")).unwrap();
            assert_eq!(found.mode() & 0o7777, expected, "{len} {mode:?}");
            assert_eq!(
                (found.mtime(), found.mtime_nsec()),
                (1_600_000_000, 123_000_000)
            );
        }
        assert_eq!(fs::read_dir(subject.directory.path()).unwrap().count(), 1);
    }

    pub(super) async fn file_larger_than_a_message_is_streamed(subject: FilesSubject) {
        // More than one message can hold.
        let data = pattern(70 << 20);
        let uri = subject.uri("large");
        let written = subject
            .files
            .write_file(&uri, data.clone().into(), Default::default());
        written.await.unwrap();
        assert!(fs::read(subject.path("large")).unwrap() == data);
        let read = subject.files.read_file(&uri, Default::default()).await;
        assert!(read.unwrap() == data);
    }

    pub(super) async fn file_errors_have_code_and_path(subject: FilesSubject) {
        let files = &subject.files;
        let missing = subject.uri("missing/f");
        let outcomes = [
            files.read_file(&missing, Default::default()).await.err(),
            files
                .write_file(&missing, "x".into(), Default::default())
                .await
                .err(),
            files.metadata(&missing, Default::default()).await.err(),
            files.canonicalize(&missing, None).await.err(),
            files
                .read_directory(&missing, Default::default())
                .await
                .err(),
            files.walk(&missing, Default::default()).await.err(),
            files.remove(&missing, Default::default()).await.err(),
            files.open_read(&missing, Default::default()).await.err(),
            files.open_write(&missing, Default::default()).await.err(),
            files.hash(&missing, Default::default()).await.err(),
            files
                .rename(&missing, &subject.uri("x"), Default::default())
                .await
                .err(),
        ];
        for (number, error) in outcomes.into_iter().enumerate() {
            let error = error.unwrap();
            assert_eq!(error.code(), Some(codes::NOT_FOUND), "{number}: {error}");
            assert!(error.to_string().contains("missing/f"), "{number}: {error}");
        }
        let directory = subject.uri("");
        let refused = files.read_file(&directory, Default::default()).await;
        assert_eq!(code(refused), Some(codes::INVALID_REQUEST));
        let foreign = "file://server/share".parse().unwrap();
        let refused = files.metadata(&foreign, Default::default()).await;
        assert_eq!(code(refused), Some(codes::INVALID_REQUEST));
        let mode = Some(0o17777);
        let options = WriteOptions {
            mode,
            ..WriteOptions::default()
        };
        let refused = files
            .write_file(&subject.uri("f"), "".into(), options)
            .await;
        assert_eq!(code(refused), Some(codes::INVALID_PARAMS));
    }

    pub(super) async fn symlinks_are_refused_when_requested(subject: FilesSubject) {
        let files = &subject.files;
        fs::create_dir(subject.path("real")).unwrap();
        fs::write(subject.path("real/f"), "x").unwrap();
        symlink("real", subject.path("via")).unwrap();
        symlink("real/f", subject.path("leaf")).unwrap();
        let access = AccessOptions {
            links: Links::Refuse,
            sandbox: None,
        };
        for name in ["via/f", "leaf"] {
            let uri = subject.uri(name);
            assert!(files.read_file(&uri, access.clone()).await.is_err());
            assert!(files.metadata(&uri, access.clone()).await.is_err());
            let options = WriteOptions {
                links: Links::Refuse,
                ..WriteOptions::default()
            };
            assert!(files.write_file(&uri, "y".into(), options).await.is_err());
            assert_eq!(
                files
                    .read_file(&uri, AccessOptions::default())
                    .await
                    .unwrap(),
                "x",
                "{name}"
            );
        }
        let read = files.read_file(&subject.uri("real/f"), access).await;
        assert_eq!(read.unwrap(), "x");
    }

    pub(super) async fn read_stream_returns_any_range(subject: FilesSubject) {
        let data = pattern(5_000_001);
        fs::write(subject.path("f"), &data).unwrap();
        let uri = subject.uri("f");
        let mut stream = subject
            .files
            .open_read(&uri, Default::default())
            .await
            .unwrap();
        let mut read = Vec::new();
        stream.read_to_end(&mut read).await.unwrap();
        assert!(read == data);
        let options = ReadStreamOptions {
            offset: 4_000_000,
            sandbox: None,
        };
        let mut stream = subject.files.open_read(&uri, options).await.unwrap();
        read.clear();
        stream.read_to_end(&mut read).await.unwrap();
        assert!(read == data[4_000_000..]);
        stream.seek(std::io::SeekFrom::Start(17)).await.unwrap();
        let mut some = [0; 100];
        stream.read_exact(&mut some).await.unwrap();
        assert_eq!(some, data[17..117]);
        // More streams than may be open at a time: dropped ones are closed.
        for _ in 0..200 {
            let stream = subject.files.open_read(&uri, Default::default()).await;
            stream.unwrap().next_chunk().await.unwrap().unwrap();
        }
    }

    pub(super) async fn write_stream_replaces_updates_and_truncates(subject: FilesSubject) {
        let data = pattern(5_000_001);
        let uri = subject.uri("f");
        for mode in [WriteMode::Replace, WriteMode::Atomic, WriteMode::Update] {
            let options = WriteStreamOptions {
                mode,
                ..WriteStreamOptions::default()
            };
            let mut stream = subject.files.open_write(&uri, options).await.unwrap();
            for piece in data.chunks(77_777) {
                stream.write_all(piece).await.unwrap();
            }
            assert_eq!(stream.position(), data.len() as u64);
            stream.commit().await.unwrap();
            assert!(fs::read(subject.path("f")).unwrap() == data, "{mode:?}");
            if mode == WriteMode::Replace {
                fs::write(subject.path("f"), "old").unwrap();
            }
        }
        let options = WriteStreamOptions {
            mode: WriteMode::Update,
            offset: 3,
            sandbox: None,
            ..WriteStreamOptions::default()
        };
        let mut stream = subject.files.open_write(&uri, options).await.unwrap();
        stream.write_all(b"XYZ").await.unwrap();
        stream.flush().await.unwrap();
        stream.commit().await.unwrap();
        let mut expected = data.clone();
        expected[3..6].copy_from_slice(b"XYZ");
        assert!(fs::read(subject.path("f")).unwrap() == expected);
        let empty = subject.files.open_write(&uri, Default::default()).await;
        empty.unwrap().commit().await.unwrap();
        assert_eq!(fs::read(subject.path("f")).unwrap(), b"");
    }

    pub(super) async fn dropped_write_stream_leaves_the_file_unchanged(subject: FilesSubject) {
        fs::write(subject.path("f"), "old").unwrap();
        let uri = subject.uri("f");
        let stream = subject.files.open_write(&uri, Default::default()).await;
        let mut stream = stream.unwrap();
        stream.write_all(&pattern(3 << 20)).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(fs::read(subject.path("f")).unwrap(), b"old");
        drop(stream);
        // The server removes the temporary file when it processes the close.
        exec_server_testkit::proc::eventually("nothing but the file", || {
            let names: Vec<_> = fs::read_dir(subject.directory.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            if names == ["f"] {
                Ok(())
            } else {
                Err(format!("{names:?}"))
            }
        })
        .await;
        assert_eq!(fs::read(subject.path("f")).unwrap(), b"old");
    }

    pub(super) async fn write_stream_fails_permanently_after_an_error(subject: FilesSubject) {
        let uri = subject.uri("f");
        let stream = subject.files.open_write(&uri, Default::default()).await;
        let mut stream = stream.unwrap();
        // An offset beyond the largest file size.
        let options = WriteStreamOptions {
            offset: u64::MAX >> 1,
            ..WriteStreamOptions::default()
        };
        let mut broken = subject.files.open_write(&uri, options).await.unwrap();
        broken.write_all(b"x").await.unwrap();
        let error = broken.flush().await.unwrap_err().to_string();
        assert_eq!(broken.flush().await.unwrap_err().to_string(), error);
        assert!(broken.write_all(b"x").await.is_err());
        assert!(broken.commit().await.is_err());
        stream.write_all(b"fine").await.unwrap();
        stream.commit().await.unwrap();
        assert_eq!(fs::read(subject.path("f")).unwrap(), b"fine");
    }

    pub(super) async fn directories_are_created_listed_and_removed(subject: FilesSubject) {
        let files = &subject.files;
        let deep = subject.uri("a/b/c");
        let once = CreateDirectoryOptions {
            recursive: false,
            ..CreateDirectoryOptions::default()
        };
        let refused = files.create_directory(&deep, once.clone()).await;
        assert_eq!(code(refused), Some(codes::NOT_FOUND));
        for _ in 0..2 {
            files
                .create_directory(&deep, Default::default())
                .await
                .unwrap();
        }
        let refused = files.create_directory(&deep, once).await;
        assert_eq!(code(refused), Some(codes::INTERNAL));
        fs::write(subject.path("a/f"), "x").unwrap();
        symlink("f", subject.path("a/to-f")).unwrap();
        symlink("nowhere", subject.path("a/dangling")).unwrap();
        let names = async |links| {
            let options = ReadDirectoryOptions {
                links,
                sandbox: None,
                ..ReadDirectoryOptions::default()
            };
            let uri = subject.uri("a");
            let mut listed: Vec<_> = files
                .read_directory(&uri, options)
                .await
                .unwrap()
                .into_iter()
                .map(|entry| {
                    (
                        entry.file_name,
                        entry.is_directory,
                        entry.is_file,
                        entry.symlink_target,
                    )
                })
                .collect();
            listed.sort();
            listed
        };
        let entry = |name: &str, directory, file, says: Option<&str>| {
            (
                name.to_owned(),
                directory,
                file,
                says.map(ToOwned::to_owned),
            )
        };
        assert_eq!(
            names(false).await,
            [
                entry("b", true, false, None),
                entry("f", false, true, None),
                entry("to-f", false, true, None),
            ]
        );
        assert_eq!(
            names(true).await,
            [
                entry("b", true, false, None),
                entry("dangling", false, false, Some("nowhere")),
                entry("f", false, true, None),
                entry("to-f", false, true, Some("f")),
            ]
        );
        let plain = RemoveOptions::default();
        let refused = files.remove(&subject.uri("a"), plain.clone()).await;
        assert_eq!(code(refused), Some(codes::INTERNAL), "not empty");
        files
            .remove(&subject.uri("a/dangling"), plain.clone())
            .await
            .unwrap();
        let tree = RemoveOptions {
            recursive: true,
            ..RemoveOptions::default()
        };
        files.remove(&subject.uri("a"), tree.clone()).await.unwrap();
        let refused = files.remove(&subject.uri("a"), tree.clone()).await;
        assert_eq!(code(refused), Some(codes::NOT_FOUND));
        let force = RemoveOptions {
            force: true,
            ..tree
        };
        files.remove(&subject.uri("a"), force).await.unwrap();
    }

    pub(super) async fn file_names_with_any_bytes_round_trip(subject: FilesSubject) {
        let names: [&[u8]; 7] = [
            b"with space",
            b"new\nline",
            b"\xff\xfe",
            b"100%",
            b"#?",
            b"C:",
            "\u{e9}\u{fffd}".as_bytes(),
        ];
        let directory = subject.uri("");
        for name in names {
            let uri = child(&directory, std::ffi::OsStr::from_bytes(name)).unwrap();
            let content = bytes::Bytes::from_static(name);
            subject
                .files
                .write_file(&uri, content, Default::default())
                .await
                .unwrap();
        }
        let mut seen: Vec<_> = fs::read_dir(subject.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().as_bytes().to_vec())
            .collect();
        seen.sort();
        let mut expected = names.map(<[u8]>::to_vec);
        expected.sort();
        assert_eq!(seen, expected);
        let listed = subject
            .files
            .read_directory(&directory, Default::default())
            .await
            .unwrap();
        assert_eq!(listed.len(), names.len());
        for entry in listed {
            let uri = match entry.path {
                Some(path) => path,
                None => child(&directory, &entry.file_name).unwrap(),
            };
            let read = subject.files.read_file(&uri, Default::default()).await;
            let native = uri.to_native().unwrap();
            assert_eq!(read.unwrap(), native.file_name().unwrap().as_bytes());
        }
    }

    pub(super) async fn walk_returns_a_bounded_tree(subject: FilesSubject) {
        for directory in ["a/b", "c", ".hidden/d"] {
            fs::create_dir_all(subject.path(directory)).unwrap();
        }
        for file in ["a/b/1", "a/2", "c/\u{e9}", ".hidden/d/3"] {
            fs::write(subject.path(file), "").unwrap();
        }
        let root = subject.uri("");
        let walked = subject
            .files
            .walk(&root, TreeWalkOptions::default())
            .await
            .unwrap();
        let expected = [
            (".hidden", WalkKind::Directory),
            ("a", WalkKind::Directory),
            ("c", WalkKind::Directory),
            (".hidden/d", WalkKind::Directory),
            ("a/2", WalkKind::File),
            ("a/b", WalkKind::Directory),
            ("c/\u{e9}", WalkKind::File),
            (".hidden/d/3", WalkKind::File),
            ("a/b/1", WalkKind::File),
        ];
        let found: Vec<_> = walked
            .entries
            .iter()
            .map(|entry| (entry.path.clone(), entry.kind))
            .collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|(name, kind)| (subject.uri(name), *kind))
            .collect();
        assert_eq!(found, expected);
        assert!(!walked.truncated && walked.errors.is_empty());
        let bounded = TreeWalkOptions {
            max_entries: 2,
            ..TreeWalkOptions::default()
        };
        assert!(subject.files.walk(&root, bounded).await.unwrap().truncated);
        let too_much = TreeWalkOptions {
            max_depth: 1000,
            ..TreeWalkOptions::default()
        };
        let refused = subject.files.walk(&root, too_much).await;
        assert_eq!(code(refused), Some(codes::INVALID_REQUEST));
    }

    pub(super) async fn copy_and_rename_move_trees_and_files(subject: FilesSubject) {
        let files = &subject.files;
        fs::create_dir(subject.path("d")).unwrap();
        fs::write(subject.path("d/f"), "x").unwrap();
        symlink("f", subject.path("d/l")).unwrap();
        let (from, to) = (subject.uri("d"), subject.uri("e"));
        let refused = files.copy(&from, &to, CopyOptions::default()).await;
        assert_eq!(code(refused), Some(codes::INVALID_REQUEST));
        let tree = CopyOptions {
            recursive: true,
            sandbox: None,
            ..CopyOptions::default()
        };
        files.copy(&from, &to, tree).await.unwrap();
        assert_eq!(fs::read(subject.path("e/f")).unwrap(), b"x");
        assert_eq!(
            fs::read_link(subject.path("e/l")).unwrap().to_str(),
            Some("f")
        );
        let (f, g) = (subject.uri("e/f"), subject.uri("d/f"));
        fs::write(subject.path("e/f"), "new").unwrap();
        let refused = files.rename(&f, &g, RenameOptions::default()).await;
        assert_eq!(code(refused), Some(codes::INVALID_REQUEST), "it is there");
        let over = RenameOptions {
            overwrite: true,
            sandbox: None,
        };
        files.rename(&f, &g, over).await.unwrap();
        assert_eq!(fs::read(subject.path("d/f")).unwrap(), b"new");
        assert!(!subject.path("e/f").exists());
        let canonical = files.canonicalize(&subject.uri("d/l"), None).await.unwrap();
        assert_eq!(canonical, subject.uri("d/f"));
    }

    pub(super) async fn metadata_is_set_and_returned(subject: FilesSubject) {
        let files = &subject.files;
        fs::write(subject.path("f"), "hello").unwrap();
        let uri = subject.uri("f");
        let options = SetMetadata {
            mode: Some(0o2750),
            modified_at_ms: Some(-1500),
            ..SetMetadata::default()
        };
        files.set_metadata(&uri, options).await.unwrap();
        let found = files.metadata(&uri, Default::default()).await.unwrap();
        let truth = fs::metadata(subject.path("f")).unwrap();
        assert!(found.is_file && !found.is_directory && !found.is_symlink);
        assert_eq!(
            (found.size, found.modified_at_ms, found.mode),
            (5, -1500, Some(0o2750))
        );
        assert_eq!(
            (found.uid, found.gid, found.inode),
            (Some(truth.uid()), Some(truth.gid()), Some(truth.ino()))
        );
        let link = subject.uri("l");
        files.create_symlink(&link, "f", None).await.unwrap();
        let refused = files.create_symlink(&link, "g", None).await;
        assert_eq!(code(refused), Some(codes::INTERNAL));
        let found = files.metadata(&link, Default::default()).await.unwrap();
        assert!(found.is_symlink && found.is_file);
        assert_eq!(found.symlink_target.as_deref(), Some("f"));
        for feature in [Feature::Metadata, Feature::Rename, Feature::ListLinks] {
            assert!(files.supports(feature).await.unwrap(), "{feature:?}");
        }
    }

    pub(super) async fn hash_covers_the_file_or_its_beginning(subject: FilesSubject) {
        fs::write(subject.path("f"), "abcdef").unwrap();
        let uri = subject.uri("f");
        let hash = async |length| {
            let options = HashOptions {
                length,
                sandbox: None,
            };
            let result = subject.files.hash(&uri, options).await.unwrap();
            (result.sha256, result.length)
        };
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash(Some(3)).await, (abc.to_owned(), 3));
        assert_eq!(hash(None).await.1, 6);
        assert_eq!(hash(Some(100)).await, hash(None).await);
    }

    pub(super) async fn search_returns_matches_with_context(subject: FilesSubject) {
        fs::create_dir(subject.path("sub")).unwrap();
        fs::write(subject.path("a.rs"), "one\nneedle (1)\nthree\n").unwrap();
        fs::write(subject.path("sub/b.txt"), "NEEDLE\n").unwrap();
        let root = subject.uri("");
        let lines = async |pattern: &str, options: SearchOptions| {
            let found = subject.files.search(&root, pattern, options).await.unwrap();
            let line = |found: SearchMatch| (found.path, found.line, found.column, found.text);
            found.matches.into_iter().map(line).collect::<Vec<_>>()
        };
        let here = (subject.uri("a.rs"), 2, 1, "needle (1)".to_owned());
        let there = (subject.uri("sub/b.txt"), 1, 1, "NEEDLE".to_owned());
        let found = lines("n..dle", SearchOptions::default()).await;
        assert_eq!(found, std::slice::from_ref(&here));
        let any_case = SearchOptions {
            case_sensitive: false,
            ..SearchOptions::default()
        };
        assert_eq!(
            lines("needle", any_case.clone()).await,
            [here.clone(), there]
        );
        let one_kind = SearchOptions {
            globs: vec!["*.rs".to_owned()],
            ..any_case
        };
        assert_eq!(lines("needle", one_kind).await, [here]);
        let plain = SearchOptions {
            regex: false,
            context_lines: 1,
            ..SearchOptions::default()
        };
        let found = subject.files.search(&root, "(1)", plain).await.unwrap();
        assert_eq!(found.matches[0].before, ["one"]);
        assert_eq!(found.matches[0].after, ["three"]);
        let refused = subject
            .files
            .search(&root, "(", SearchOptions::default())
            .await;
        assert_eq!(code(refused), Some(codes::INVALID_PARAMS));
        let missing = subject.uri("missing");
        let refused = subject
            .files
            .search(&missing, "x", SearchOptions::default())
            .await;
        assert_eq!(code(refused), Some(codes::NOT_FOUND));
    }

    pub(super) async fn watch_reports_changes_except_ignored_ones(subject: FilesSubject) {
        fs::create_dir(subject.path("quiet")).unwrap();
        let options = WatchOptions {
            ignore: WatchIgnore {
                gitignore: false,
                patterns: vec!["quiet".to_owned()],
            },
            debounce: std::time::Duration::from_millis(1),
            ..WatchOptions::default()
        };
        let root = subject.uri("");
        let mut changes = subject.files.watch(&root, options).await.unwrap();
        assert_eq!(*changes.path(), root);
        fs::write(subject.path("quiet/f"), "").unwrap();
        fs::write(subject.path("f"), "").unwrap();
        fs::create_dir(subject.path("d")).unwrap();
        fs::write(subject.path("d/g"), "").unwrap();
        let mut awaited = vec![subject.uri("f"), subject.uri("d"), subject.uri("d/g")];
        while !awaited.is_empty() {
            let batch = changes.recv().await.unwrap();
            assert!(!batch.overflow);
            for change in batch.changes {
                assert!(!change.path.as_str().contains("quiet"), "{change:?}");
                awaited.retain(|path| *path != change.path);
            }
        }
        fs::write(subject.path("e"), "").unwrap();
        while !changes
            .recv()
            .await
            .unwrap()
            .changes
            .iter()
            .any(|c| c.path == subject.uri("e"))
        {}
        fs::rename(subject.path("f"), subject.path("h")).unwrap();
        fs::remove_file(subject.path("e")).unwrap();
        let (mut renamed, mut removed) = (false, false);
        while !(renamed && removed) {
            for change in changes.recv().await.unwrap().changes {
                renamed |= change.path == subject.uri("h");
                removed |= change.kind == ChangeKind::Removed && change.path == subject.uri("e");
            }
        }
        drop(changes);
        let missing = subject.uri("missing");
        let refused = subject.files.watch(&missing, WatchOptions::default()).await;
        assert_eq!(code(refused), Some(codes::NOT_FOUND));
        // More watches than allowed at a time: dropped ones are ended. One stays, so the tree stays
        // registered, so that the kernel's own limits do not matter.
        let _stays = subject
            .files
            .watch(&root, WatchOptions::default())
            .await
            .unwrap();
        for _ in 0..MAX_WATCHES * 3 {
            let watch = subject.files.watch(&root, WatchOptions::default()).await;
            drop(watch.unwrap());
        }
    }

    pub(super) async fn watch_missing_reports_a_created_path(subject: FilesSubject) {
        let files = &subject.files;
        let (missing, present) = (subject.uri("a/b"), subject.uri(""));
        let wait = async |missing: &[PathUri]| {
            let watch = files.watch_missing(missing, Some(&present)).await;
            watch.unwrap()
        };
        assert!(wait(&[]).await.is_none());
        assert!(wait(&[subject.uri("")]).await.is_none(), "it is there");
        let first = wait(std::slice::from_ref(&missing)).await.unwrap();
        let second = wait(std::slice::from_ref(&missing)).await.unwrap();
        assert!(first.changed().await.is_err(), "replaced");
        fs::create_dir_all(subject.path("a/b")).unwrap();
        second.changed().await.unwrap();
        assert!(wait(std::slice::from_ref(&missing)).await.is_none());
    }

    /// A policy that allows reading everything except `secret`, and writing only to `work`.
    fn policy(subject: &FilesSubject) -> Option<Sandbox> {
        let entry = |name: &str, access| SandboxEntry {
            path: EntryPath::Path {
                path: subject.uri(name),
            },
            access,
            missing_path_behavior: None,
        };
        let root = SandboxEntry {
            path: EntryPath::Special {
                value: SpecialPath::Root,
            },
            access: Allowed::Read,
            missing_path_behavior: None,
        };
        let work = entry("work", Allowed::Write);
        Some(restricted(vec![root, work, entry("secret", Allowed::Deny)]))
    }

    fn restricted(entries: Vec<SandboxEntry>) -> Sandbox {
        Sandbox::new(Permissions::Managed {
            file_system: FilePermissions::Restricted {
                entries,
                glob_scan_max_depth: None,
            },
            network: NetworkPermission::Restricted,
        })
    }

    pub(super) async fn policies_bind_every_operation(subject: FilesSubject) {
        for name in ["work", "secret", "other"] {
            fs::create_dir(subject.path(name)).unwrap();
            fs::write(subject.path(&format!("{name}/f")), name).unwrap();
        }
        symlink("../secret/f", subject.path("work/link")).unwrap();
        let files = &subject.files;
        let sandbox = policy(&subject);
        let access = || AccessOptions {
            links: Links::Follow,
            sandbox: sandbox.clone(),
        };
        let [work, secret, other] = ["work/f", "secret/f", "other/f"].map(|name| subject.uri(name));

        // Readable files have the same content as without a policy.
        for file in [&work, &other] {
            let bound = files.read_file(file, access()).await.unwrap();
            assert_eq!(
                bound,
                files
                    .read_file(file, AccessOptions::default())
                    .await
                    .unwrap()
            );
            let bound = files.metadata(file, access()).await.unwrap();
            assert_eq!(
                bound,
                files
                    .metadata(file, AccessOptions::default())
                    .await
                    .unwrap()
            );
            let bound = files.canonicalize(file, sandbox.clone()).await.unwrap();
            assert_eq!(bound, *file);
            let hash = HashOptions {
                sandbox: sandbox.clone(),
                ..HashOptions::default()
            };
            let bound = files.hash(file, hash).await.unwrap();
            assert_eq!(
                bound,
                files.hash(file, HashOptions::default()).await.unwrap()
            );
        }
        let list = ReadDirectoryOptions {
            links: true,
            sandbox: sandbox.clone(),
            ..ReadDirectoryOptions::default()
        };
        let mut listed = files
            .read_directory(&subject.uri("work"), list)
            .await
            .unwrap();
        listed.sort_by(|one, other| one.file_name.cmp(&other.file_name));
        let listed: Vec<_> = listed
            .iter()
            .map(|entry| (&*entry.file_name, entry.symlink_target.as_deref()))
            .collect();
        assert_eq!(listed, [("f", None), ("link", Some("../secret/f"))]);
        let walk = TreeWalkOptions {
            sandbox: sandbox.clone(),
            ..TreeWalkOptions::default()
        };
        let walked = files
            .walk(&subject.uri("other"), walk.clone())
            .await
            .unwrap();
        assert_eq!(walked.entries[0].path, other);
        let mut pages = WalkPages::new(files.clone(), &subject.uri("work"), walk);
        let page = pages.next().await.unwrap().unwrap();
        assert_eq!((page.entries.len(), &page.entries[0].path), (1, &work));
        assert!(pages.next().await.unwrap().is_none());
        let search = SearchOptions {
            sandbox: sandbox.clone(),
            ..SearchOptions::default()
        };
        let found = files
            .search(&subject.uri(""), "work|secret|other", search)
            .await;
        let mut found: Vec<_> = found.unwrap().matches;
        found.retain(|found| found.path != work && found.path != other);
        assert_eq!(found, []);
        let stream = ReadStreamOptions {
            offset: 1,
            sandbox: sandbox.clone(),
        };
        let mut stream = files.open_read(&other, stream).await.unwrap();
        let mut read = String::new();
        stream.read_to_string(&mut read).await.unwrap();
        assert_eq!(read, "ther");

        // Denied files cannot be read, not even through a link.
        for file in [&secret, &subject.uri("work/link")] {
            assert!(code(files.read_file(file, access()).await).is_some());
            let hash = HashOptions {
                sandbox: sandbox.clone(),
                ..HashOptions::default()
            };
            assert!(code(files.hash(file, hash).await).is_some());
            let stream = ReadStreamOptions {
                offset: 0,
                sandbox: sandbox.clone(),
            };
            assert!(code(files.open_read(file, stream).await).is_some());
        }

        // Every kind of write succeeds in the writable directory.
        write_everywhere(&subject, "work", &sandbox, true).await;
        // Writes elsewhere fail and change nothing.
        write_everywhere(&subject, "other", &sandbox, false).await;
        write_everywhere(&subject, "secret", &sandbox, false).await;
        for name in ["secret", "other"] {
            let left: Vec<_> = fs::read_dir(subject.path(name)).unwrap().collect();
            assert_eq!(left.len(), 1, "{left:?}");
            let left = fs::read_to_string(subject.path(&format!("{name}/f")));
            assert_eq!(left.unwrap(), name);
        }
        let watch = WatchOptions {
            sandbox,
            ..WatchOptions::default()
        };
        let refused = code(files.watch(&subject.uri("work"), watch).await);
        assert_eq!(refused, Some(codes::INVALID_PARAMS));
    }

    /// Does everything that changes files in a directory; all of it succeeds, or none.
    async fn write_everywhere(
        subject: &FilesSubject,
        name: &str,
        sandbox: &Option<Sandbox>,
        allowed: bool,
    ) {
        let files = &subject.files;
        let uri = |entry: &str| subject.uri(&format!("{name}/{entry}"));
        let sandbox = || sandbox.clone();
        let options = WriteOptions {
            sandbox: sandbox(),
            ..WriteOptions::default()
        };
        let stream = |mode| WriteStreamOptions {
            mode,
            offset: 0,
            sandbox: sandbox(),
            ..WriteStreamOptions::default()
        };
        let directory = CreateDirectoryOptions {
            sandbox: sandbox(),
            ..CreateDirectoryOptions::default()
        };
        let set = SetMetadata {
            mode: Some(0o600),
            sandbox: sandbox(),
            ..SetMetadata::default()
        };
        let copy = CopyOptions {
            sandbox: sandbox(),
            ..CopyOptions::default()
        };
        let rename = RenameOptions {
            sandbox: sandbox(),
            ..RenameOptions::default()
        };
        let remove = RemoveOptions {
            recursive: true,
            sandbox: sandbox(),
            ..RemoveOptions::default()
        };
        let streamed = async |mode, to: &PathUri| {
            let mut stream = files.open_write(to, stream(mode)).await?;
            stream.write_chunk("streamed".into()).await?;
            stream.commit().await
        };
        let outcomes = [
            files.write_file(&uri("new"), "x".into(), options).await,
            files.create_directory(&uri("d"), directory).await,
            files.set_metadata(&uri("f"), set).await,
            files.create_symlink(&uri("l"), "f", sandbox()).await,
            files.copy(&uri("f"), &uri("copy"), copy).await,
            files.rename(&uri("copy"), &uri("moved"), rename).await,
            streamed(WriteMode::Atomic, &uri("a")).await,
            streamed(WriteMode::Replace, &uri("r")).await,
            streamed(WriteMode::Update, &uri("u")).await,
            files.remove(&uri("d"), remove).await,
        ];
        for (number, outcome) in outcomes.into_iter().enumerate() {
            assert_eq!(outcome.is_ok(), allowed, "{name} {number}: {outcome:?}");
            let Err(error) = outcome else { continue };
            assert!(error.code().is_some(), "{name} {number}: {error}");
        }
        if allowed {
            for written in ["a", "r", "u"] {
                let path = subject.path(&format!("{name}/{written}"));
                assert_eq!(fs::read_to_string(path).unwrap(), "streamed");
            }
        }
    }

    pub(super) async fn policies_that_cannot_be_resolved_are_refused(subject: FilesSubject) {
        let project = SandboxEntry {
            path: EntryPath::Special {
                value: SpecialPath::ProjectRoots { subpath: None },
            },
            access: Allowed::Read,
            missing_path_behavior: None,
        };
        let access = AccessOptions {
            links: Links::Follow,
            sandbox: Some(restricted(vec![project])),
        };
        let refused = subject.files.metadata(&subject.uri(""), access).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Some(codes::INVALID_PARAMS), "{refused}");
        assert!(refused.to_string().contains("requires cwd"), "{refused}");
    }

    pub(super) async fn listings_have_any_length(subject: FilesSubject) {
        const COUNT: usize = 50_100;
        let crowd = tempfile::tempdir_in("/dev/shm").unwrap();
        let first = crowd.path().join("00000");
        fs::write(&first, "").unwrap();
        for n in 1..COUNT {
            fs::hard_link(&first, crowd.path().join(format!("{n:05}"))).unwrap();
        }
        let root = exec_server::fs::uri(crowd.path()).unwrap();
        assert!(subject.files.supports(Feature::Pages).await.unwrap());
        let options = ReadDirectoryOptions::default();
        let mut listed = subject
            .files
            .read_directory(&root, options.clone())
            .await
            .unwrap();
        listed.sort_by(|one, other| one.file_name.cmp(&other.file_name));
        assert_eq!(listed.len(), COUNT);
        assert_eq!(listed[COUNT - 1].file_name, format!("{}", COUNT - 1));

        let mut pages = DirectoryPages::new(subject.files.clone(), &root, options);
        let mut counts = Vec::new();
        while let Some(page) = pages.next().await.unwrap() {
            counts.push(page.len());
        }
        assert_eq!(counts, [50_000, 100]);
        assert!(pages.next().await.unwrap().is_none());

        let mut pages = WalkPages::new(subject.files.clone(), &root, TreeWalkOptions::default());
        let mut walked = Vec::new();
        while let Some(page) = pages.next().await.unwrap() {
            assert!(!page.truncated && page.errors.is_empty());
            walked.extend(page.entries);
        }
        let expected = listed
            .iter()
            .map(|entry| child(&root, &entry.file_name).unwrap());
        assert!(walked.iter().map(|entry| entry.path.clone()).eq(expected));
        // Without a limit, the whole listing is one response.
        let whole = subject
            .files
            .walk(&root, TreeWalkOptions::default())
            .await
            .unwrap();
        assert!(whole.truncated && whole.entries.len() <= 50_000 && whole.next.is_none());
    }

    pub(super) async fn sandbox_policy_is_enforced_or_refused(subject: FilesSubject) {
        let access = |permissions| AccessOptions {
            links: Links::Follow,
            sandbox: Some(Sandbox::new(permissions)),
        };
        let nothing = Permissions::Managed {
            file_system: FilePermissions::Restricted {
                entries: Vec::new(),
                glob_scan_max_depth: None,
            },
            network: NetworkPermission::Restricted,
        };
        let uri = subject.uri("");
        let refused = code(subject.files.metadata(&uri, access(nothing)).await);
        let codes = [codes::INVALID_PARAMS, codes::NOT_FOUND].map(Some);
        assert!(codes.contains(&refused), "{refused:?}");
        let disabled = access(Permissions::Disabled);
        let allowed = subject.files.metadata(&uri, disabled).await;
        assert!(allowed.unwrap().is_directory);
    }
}
