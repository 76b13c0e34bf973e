//! Uploads and downloads of whole trees.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use exec_server::fs::uri;
use exec_server::transfer::{TransferError, TransferOptions, TransferReport, download, upload};

use crate::pattern;
use crate::subjects::FilesSubject;

crate::over_all_subjects! { transfers:
    uploaded_tree_is_downloaded_unchanged;
    failures_of_single_files_are_listed;
    transfer_does_not_write_through_existing_links;
    interrupted_upload_is_resumed;
    interrupted_download_is_resumed;
    two_thousand_small_files_are_transferred;
}

fn options(archive: bool) -> TransferOptions {
    let mut options = TransferOptions::default();
    options.recursive = true;
    options.archive = archive;
    options
}

async fn send(
    subject: &FilesSubject,
    from: &Path,
    to: &str,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    upload(from, subject.files.clone(), &subject.uri(to), options).await
}

async fn fetch(
    subject: &FilesSubject,
    from: &str,
    to: &Path,
    options: TransferOptions,
) -> Result<TransferReport, TransferError> {
    download(subject.files.clone(), &subject.uri(from), to, options).await
}

fn set(path: &Path, mode: u32, seconds: u64) {
    let file = fs::File::open(path).unwrap();
    file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds))
        .unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// All entries below a directory: names, kinds, contents; with `marks` also modes and times.
fn picture(root: &Path, marks: bool) -> Vec<String> {
    fn describe(root: &Path, directory: &Path, marks: bool, lines: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            let name = format!("{:?}", path.strip_prefix(root).unwrap());
            let mut line = if found.is_symlink() {
                format!("{name} -> {:?}", fs::read_link(&path).unwrap())
            } else if found.is_dir() {
                describe(root, &path, marks, lines);
                format!("{name}/")
            } else {
                format!("{name} {:?}", digest(&fs::read(&path).unwrap()))
            };
            if marks && !found.is_symlink() {
                line += &format!(" {:o} {}", found.mode() & 0o7777, found.mtime());
            }
            lines.push(line);
        }
    }
    let mut lines = Vec::new();
    describe(root, root, marks, &mut lines);
    lines.sort();
    lines
}

/// Length and a hash.
fn digest(data: &[u8]) -> (usize, u64) {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    hasher.write(data);
    (data.len(), hasher.finish())
}

fn complete(report: &TransferReport) {
    assert!(report.failures.is_empty(), "{:?}", report.failures);
}

/// A tree with unusual names, links of every kind, modes, times, empty and large files.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    fs::create_dir_all(root.join("sub/deep/er")).unwrap();
    for (name, len) in [
        (&b"plain"[..], 10),
        (b"empty", 0),
        (b"with space", 4096),
        (b"new\nline", 3),
        (b"\xff\xfe", 7),
        (b"C:", 1),
        (b"sub/deep/er/large", 3_000_000),
        (b"sub/exact", 1 << 20),
        (b"script", 20),
    ] {
        let path = root.join(OsStr::from_bytes(name));
        fs::write(&path, pattern(len)).unwrap();
        set(&path, 0o640, 1_500_000_000 + len as u64);
    }
    fs::set_permissions(root.join("script"), fs::Permissions::from_mode(0o755)).unwrap();
    for (target, name) in [
        ("plain", "to-file"),
        ("sub", "to-directory"),
        ("nowhere", "dangling"),
        ("/etc/passwd", "outside"),
        ("..", "sub/up"),
    ] {
        symlink(target, root.join(name)).unwrap();
    }
    // A directory that only root may write to after it was created.
    set(&root.join("sub/deep/er"), 0o555, 1_400_000_000);
    set(&root.join("sub"), 0o750, 1_400_000_001);
}

pub(crate) async fn uploaded_tree_is_downloaded_unchanged(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let source = here.path().join("source");
    fs::create_dir(&source).unwrap();
    tree(&source);
    for archive in [true, false] {
        let name = if archive { "exact" } else { "plain" };
        let last = Arc::new(Mutex::new((0, 0, 0, 0)));
        let seen = Arc::clone(&last);
        let mut options = options(archive);
        options.progress = Some(Arc::new(move |now| {
            let mut last = seen.lock().unwrap();
            assert!(now.files <= now.total_files && now.bytes <= now.total_bytes);
            *last = (*last).max((now.files, now.total_files, now.bytes, now.total_bytes));
        }));
        let sent = send(&subject, &source, name, options.clone());
        let sent = sent.await.unwrap();
        complete(&sent);
        assert_eq!((sent.files, sent.directories, sent.links), (9, 5, 5));
        assert_eq!(*last.lock().unwrap(), (9, 9, sent.bytes, sent.bytes));
        assert_eq!(
            picture(&source, archive),
            picture(&subject.path(name), archive)
        );
        let mode = |name: &Path| fs::metadata(name).unwrap().mode() & 0o111;
        assert_eq!(mode(&subject.path(name).join("script")), 0o111);
        assert_eq!(mode(&subject.path(name).join("plain")), 0);

        let back = here.path().join(name);
        *last.lock().unwrap() = (0, 0, 0, 0);
        let fetched = fetch(&subject, name, &back, options);
        let fetched = fetched.await.unwrap();
        complete(&fetched);
        assert_eq!(
            (fetched.files, fetched.directories, fetched.links),
            (9, 5, 5)
        );
        assert_eq!(fetched.bytes, sent.bytes);
        assert_eq!(*last.lock().unwrap(), (9, 9, sent.bytes, sent.bytes));
        assert_eq!(picture(&source, archive), picture(&back, archive));
        assert_eq!(mode(&back.join("script")), 0o111);
    }
    // The second copy replaces the existing tree, including links.
    let again = send(&subject, &source, "plain", options(true));
    complete(&again.await.unwrap());
    assert_eq!(
        picture(&source, true),
        picture(&subject.path("plain"), true)
    );
}

pub(crate) async fn failures_of_single_files_are_listed(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let source = here.path().join("source");
    fs::create_dir_all(source.join("d")).unwrap();
    for name in ["a", "b", "d/c"] {
        fs::write(source.join(name), name).unwrap();
    }
    let _socket = std::os::unix::net::UnixListener::bind(source.join("socket")).unwrap();
    symlink(OsStr::from_bytes(b"\xff"), source.join("odd")).unwrap();
    // A directory in place of a file.
    fs::create_dir_all(subject.path("there/b/x")).unwrap();
    let sent = send(&subject, &source, "there", options(false));
    let sent = sent.await.unwrap();
    assert_eq!((sent.files, sent.failures.len()), (2, 3), "{sent:?}");
    let reported: Vec<String> = sent.failures.iter().map(ToString::to_string).collect();
    for name in ["there/b", "source/socket", "there/odd"] {
        assert!(
            reported.iter().any(|text| text.contains(name)),
            "{reported:?}"
        );
    }
    assert_eq!(fs::read(subject.path("there/d/c")).unwrap(), b"d/c");

    fs::remove_dir_all(subject.path("there/b")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(subject.path("there/socket")).unwrap();
    let target = here.path().join("back");
    fs::create_dir_all(target.join("a")).unwrap();
    let fetched = fetch(&subject, "there", &target, options(false));
    let fetched = fetched.await.unwrap();
    assert_eq!(
        (fetched.files, fetched.failures.len()),
        (1, 2),
        "{fetched:?}"
    );
    assert_eq!(fs::read(target.join("d/c")).unwrap(), b"d/c");

    let plain = send(&subject, &source, "x", Default::default());
    assert!(matches!(
        plain.await.unwrap_err(),
        TransferError::IsDirectory(_)
    ));
    let missing = uri("/no/such/thing").unwrap();
    let missing = download(subject.files.clone(), &missing, &target, options(false));
    assert!(matches!(
        missing.await.unwrap_err(),
        TransferError::Remote { .. }
    ));
}

pub(crate) async fn transfer_does_not_write_through_existing_links(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let source = here.path().join("source");
    fs::create_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub/f"), "new").unwrap();
    fs::write(source.join("g"), "new").unwrap();
    // A link to outside in place of a directory.
    for root in [subject.path("there"), here.path().join("back")] {
        let outside = root.with_extension("outside");
        fs::create_dir_all(&outside).unwrap();
        fs::create_dir_all(&root).unwrap();
        fs::write(outside.join("f"), "old").unwrap();
        symlink(&outside, root.join("sub")).unwrap();
    }
    let to = subject.uri("there");
    let sent = upload(&source, subject.files.clone(), &to, options(false)).await;
    assert_eq!(sent.unwrap().files, 1);
    let outside = subject.path("there.outside/f");
    assert_eq!(fs::read(outside).unwrap(), b"old");

    fs::create_dir_all(subject.path("plain/sub")).unwrap();
    fs::write(subject.path("plain/sub/f"), "new").unwrap();
    let back = here.path().join("back");
    let fetched = fetch(&subject, "plain", &back, options(false));
    assert_eq!(fetched.await.unwrap().failures.len(), 1);
    let outside = here.path().join("back.outside/f");
    assert_eq!(fs::read(outside).unwrap(), b"old");
}

pub(crate) async fn interrupted_upload_is_resumed(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let source = here.path().join("image");
    let data = pattern(12 << 20);
    fs::write(&source, &data).unwrap();
    let part = subject.path(".image.exec-server-part");
    let to = subject.uri("image");
    fs::write(subject.path("image"), "old").unwrap();
    fs::set_permissions(subject.path("image"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut longer = data.clone();
    longer.extend_from_slice(b"more");
    let mut other = data[..5 << 20].to_vec();
    other[77] ^= 1;
    for (left, resumed) in [
        (None, 0),
        (Some(&data[..5_000_001]), 5_000_001),
        (Some(&data[..]), data.len() as u64),
        // A partial file with other content.
        (Some(&other[..]), 0),
        (Some(&longer[..]), 0),
        (Some(&b""[..]), 0),
    ] {
        if let Some(left) = left {
            fs::write(&part, left).unwrap();
        }
        let sent = upload(&source, subject.files.clone(), &to, Default::default()).await;
        let sent = sent.unwrap();
        complete(&sent);
        assert_eq!((sent.files, sent.resumed_bytes), (1, resumed));
        assert!(fs::read(subject.path("image")).unwrap() == data);
        assert!(!part.exists());
        let mode = fs::metadata(subject.path("image")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "an existing file keeps its mode");
        fs::write(subject.path("image"), "old").unwrap();
    }
    // A link with the name of the partial file is not followed.
    symlink("elsewhere", &part).unwrap();
    fs::write(subject.path("elsewhere"), "mine").unwrap();
    let sent = upload(&source, subject.files.clone(), &to, Default::default()).await;
    assert_eq!(sent.unwrap().failures.len(), 1);
    assert_eq!(fs::read(subject.path("elsewhere")).unwrap(), b"mine");
    assert_eq!(fs::read(subject.path("image")).unwrap(), b"old");
}

pub(crate) async fn interrupted_download_is_resumed(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let data = pattern(12 << 20);
    fs::write(subject.path("image"), &data).unwrap();
    let from = subject.uri("image");
    let target = here.path().join("image");
    let part = here.path().join(".image.exec-server-part");
    for (left, resumed) in [(0, 0), (5_000_001, 5_000_001), (data.len(), data.len())] {
        fs::write(&part, &data[..left]).unwrap();
        let fetched = download(subject.files.clone(), &from, &target, Default::default()).await;
        let fetched = fetched.unwrap();
        complete(&fetched);
        assert_eq!(fetched.resumed_bytes, resumed as u64);
        assert!(fs::read(&target).unwrap() == data && !part.exists());
        fs::write(&target, "old").unwrap();
    }
    fs::write(
        &part,
        pattern(5 << 20).iter().map(|b| !b).collect::<Vec<_>>(),
    )
    .unwrap();
    let fetched = download(subject.files.clone(), &from, &target, Default::default()).await;
    assert_eq!(fetched.unwrap().resumed_bytes, 0);
    assert!(fs::read(&target).unwrap() == data);
}

pub(crate) async fn two_thousand_small_files_are_transferred(subject: FilesSubject) {
    let here = tempfile::tempdir().unwrap();
    let source = here.path().join("source");
    for directory in 0..20 {
        let directory = source.join(directory.to_string());
        fs::create_dir_all(&directory).unwrap();
        for file in 0..100 {
            fs::write(directory.join(file.to_string()), pattern(100 + file)).unwrap();
        }
    }
    let to = subject.uri("there");
    let sent = upload(&source, subject.files.clone(), &to, options(true)).await;
    let sent = sent.unwrap();
    complete(&sent);
    assert_eq!((sent.files, sent.directories), (2000, 21));
    let back = here.path().join("back");
    let fetched = download(subject.files.clone(), &to, &back, options(true)).await;
    complete(&fetched.unwrap());
    assert_eq!(picture(&source, true), picture(&back, true));
}
