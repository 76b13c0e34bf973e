//! `cp` compared with the `cp` and `rsync` of this machine: modes, owners, holes, links, trees that
//! are kept equal, patterns, several servers, and a full disk.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

use exec_server_testkit::server::ServerProcess;

use super::{BINARY, CliFixture, pattern, see};

/// What a tree looks like: for each path its kind, mode, owner, time, content or target, and the
/// first name of the same file.
type TreePicture = BTreeMap<PathBuf, String>;

fn picture(root: &Path) -> TreePicture {
    let mut lines = BTreeMap::new();
    let mut names = BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let mut entries: Vec<_> = fs::read_dir(&directory)
            .unwrap()
            .map(|e| e.unwrap())
            .collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let name = path.strip_prefix(root).unwrap().to_owned();
            let found = fs::symlink_metadata(&path).unwrap();
            if found.is_symlink() {
                lines.insert(name, format!("-> {:?}", fs::read_link(&path).unwrap()));
                continue;
            }
            let marks = format!(
                "{:o} {}:{} {}",
                found.mode(),
                found.uid(),
                found.gid(),
                found.mtime()
            );
            let content = if found.is_dir() {
                directories.push(path);
                String::new()
            } else {
                let data = fs::read(&path).unwrap();
                let sum = data.iter().fold(7u64, |sum, byte| {
                    sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
                });
                format!("{} {sum:x} links {}", data.len(), found.nlink())
            };
            // The first name in text order stands for all names of a file.
            let all: &mut Vec<PathBuf> = names.entry((found.dev(), found.ino())).or_default();
            all.push(name.clone());
            lines.insert(name, format!("{marks} {content}"));
        }
    }
    for names in names.values_mut().filter(|names| names.len() > 1) {
        names.sort();
        for name in names.iter() {
            let line = lines.get_mut(name).unwrap();
            line.push_str(&format!(" same as {:?}", names[0]));
        }
    }
    lines
}

fn set(path: &Path, mode: u32, seconds: u64) {
    let file = fs::File::open(path).unwrap();
    file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds))
        .unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn own(path: &Path, owner: &str) {
    let status = Command::new("chown").arg(owner).arg(path).status().unwrap();
    assert!(status.success());
}

#[track_caller]
fn reference(program: &str, args: &[&str], directory: &Path) {
    let mut command = Command::new(program);
    let status = command.args(args).current_dir(directory).status();
    assert!(status.unwrap().success(), "{program} {args:?}");
}

/// A tree with modes, owners, hard links, links and holes.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("sub/deep")).unwrap();
    for (name, mode, len) in [
        ("private", 0o600, 10),
        ("readonly", 0o444, 10),
        ("script", 0o755, 10),
        ("setuid", 0o4755, 10),
        ("foreign", 0o6755, 10),
        ("sub/large", 0o640, 3 << 20),
        ("sub/image", 0o600, 9 << 20),
        ("sub/deep/first", 0o644, 5),
    ] {
        let path = root.join(name);
        fs::write(&path, pattern(len)).unwrap();
        if name == "foreign" {
            own(&path, "4321:8765");
        }
        set(&path, mode, 1_500_000_000 + len as u64);
    }
    fs::hard_link(root.join("sub/deep/first"), root.join("second")).unwrap();
    fs::hard_link(root.join("sub/large"), root.join("sub/deep/large")).unwrap();
    symlink("../private", root.join("sub/link")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    set(&root.join("sub/deep"), 0o700, 1_400_000_000);
    set(&root.join("sub"), 0o2750, 1_400_000_001);
    set(root, 0o750, 1_400_000_002);
}

#[tokio::test]
async fn cp_without_archive_has_the_modes_of_cp() {
    let test = CliFixture::new().await;
    tree(&test.here("tree"));
    let modes = |picture: TreePicture| -> BTreeMap<PathBuf, String> {
        let first = |line: &String| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let lines = picture
            .iter()
            .map(|(name, line)| (name.clone(), first(line)));
        lines.filter(|(_, line)| !line.starts_with("->")).collect()
    };
    reference("cp", &["-r", "tree", "expected"], &test.here(""));
    let expected = modes(picture(&test.here("expected")));
    test.run(&["cp", "-r", "tree", ":copy"]).ok();
    assert_eq!(modes(picture(&test.there("copy"))), expected);
    test.run(&["cp", "-r", ":copy", "back"]).ok();
    // From there no set-id bits and no other owners come back.
    assert_eq!(modes(picture(&test.here("back"))), expected);

    // Onto existing files, which keep their modes.
    for (name, mode) in [("private", 0o644), ("script", 0o600)] {
        for root in [test.here("expected"), test.there("copy")] {
            set(&root.join(name), mode, 0);
        }
    }
    reference("cp", &["-r", "tree/.", "expected"], &test.here(""));
    test.run(&["cp", "-r", "tree/.", ":copy"]).ok();
    let expected = modes(picture(&test.here("expected")));
    assert_eq!(modes(picture(&test.there("copy"))), expected);

    // Single files, with the marks of `cp -p`.
    for name in ["private", "readonly", "setuid", "foreign", "sub/image"] {
        let from = format!("tree/{name}");
        reference("cp", &["-p", &from, "expected-file"], &test.here(""));
        test.run(&["cp", "-p", &from, ":file"]).ok();
        let marks = |path: PathBuf| {
            let found = fs::metadata(path).unwrap();
            (found.mode(), found.uid(), found.gid(), found.mtime())
        };
        assert_eq!(
            marks(test.there("file")),
            marks(test.here("expected-file")),
            "{name}"
        );
        fs::remove_file(test.there("file")).unwrap();
        fs::remove_file(test.here("expected-file")).unwrap();
    }
}

#[tokio::test]
async fn cp_archive_equals_cp_archive_and_copies_nothing_twice() {
    let test = CliFixture::new().await;
    tree(&test.here("tree"));
    reference("cp", &["-a", "tree", "expected"], &test.here(""));
    let expected = picture(&test.here("expected"));
    test.run(&["cp", "-a", "tree", ":copy"]).ok();
    assert_eq!(picture(&test.there("copy")), expected);
    test.run(&["cp", "-a", ":copy", "back"]).ok();
    assert_eq!(picture(&test.here("back")), expected);

    let again = |args: &[&str], summary: &str, lines: &str| {
        let mut all = vec!["cp", "-av", "tree/.", ":copy"];
        all.extend(args);
        let again = test.run(&all);
        assert_eq!(again.code, Some(0), "{again:?}");
        assert!(again.err.contains(summary), "no {summary:?} in {again:?}");
        assert_eq!(again.text(), lines, "{args:?}");
        assert_eq!(picture(&test.there("copy")), picture(&test.here("tree")));
    };
    let before = fs::metadata(test.there("copy/private")).unwrap().ino();
    again(&[], "0 files copied (0 B), 10 unchanged, 0 removed", "");
    again(&["--checksum"], "0 files copied", "");
    assert_eq!(
        fs::metadata(test.there("copy/private")).unwrap().ino(),
        before
    );
    // A change of the mode alone copies no content, a new time does.
    fs::set_permissions(test.here("tree/script"), fs::Permissions::from_mode(0o711)).unwrap();
    again(&[], "0 files copied", "");
    set(&test.here("tree/private"), 0o600, 1_600_000_000);
    again(&[], "1 files copied", "private\n");
    // Other content with the same size and time is found by its hash only.
    let (size, time) = (10, 1_600_000_000);
    fs::write(test.here("tree/private"), vec![b'x'; size]).unwrap();
    set(&test.here("tree/private"), 0o600, time);
    let quick = test.run(&["cp", "-av", "tree/.", ":copy"]);
    assert!(quick.err.contains("0 files copied"), "{quick:?}");
    again(&["--checksum"], "1 files copied", "private\n");
}

#[tokio::test]
async fn copies_keep_holes() {
    let test = CliFixture::new().await;
    let sparse = test.here("sparse");
    let file = fs::File::create(&sparse).unwrap();
    for at in [0, 100 << 20, 200 << 20] {
        std::os::unix::fs::FileExt::write_all_at(&file, &pattern(5000), at).unwrap();
    }
    file.set_len(300 << 20).unwrap();
    let space = fs::metadata(&sparse).unwrap().blocks() * 512;
    for (args, copy) in [
        (&["cp", "sparse", ":sparse"][..], test.there("sparse")),
        (&["cp", ":sparse", "back"], test.here("back")),
        (&["fs", "cp", "sparse", "within"], test.there("within")),
        (&["fs", "cp", "-r", ".", "tree"], test.there("tree/sparse")),
    ] {
        if args.contains(&"-r") {
            fs::create_dir(test.there("from")).unwrap();
            fs::rename(test.there("sparse"), test.there("from/sparse")).unwrap();
            test.run(&["fs", "cp", "-r", "from", "tree"]).ok();
        } else {
            test.run(args).ok();
        }
        let found = fs::metadata(&copy).unwrap();
        assert_eq!(found.len(), 300 << 20, "{args:?}");
        assert!(found.blocks() * 512 <= space + (64 << 10), "{args:?}");
        let mut same = Command::new("cmp");
        assert!(same.arg(&sparse).arg(&copy).status().unwrap().success());
    }
}

#[tokio::test]
async fn copy_within_the_server_makes_no_setuid_file_of_another_user() {
    let test = CliFixture::new().await;
    for name in ["file", "tree/file"] {
        let path = test.there(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "x").unwrap();
        own(&path, "4321:8765");
        set(&path, 0o6755, 0);
    }
    test.run(&["fs", "cp", "file", "copy"]).ok();
    test.run(&["fs", "cp", "-r", "tree", "copied"]).ok();
    test.run(&["fs", "cp", "-r", "tree/.", "copied"]).ok();
    for name in ["copy", "copied/file"] {
        let found = fs::metadata(test.there(name)).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o755, 0), "{name}");
    }
}

#[tokio::test]
async fn cp_deletes_and_excludes_as_rsync() {
    let test = CliFixture::new().await;
    let source = test.here("tree");
    tree(&source);
    for name in [
        "a.o",
        "sub/b.o",
        "keep/cache/x",
        "cache/y",
        "top",
        "sub/top",
    ] {
        let path = source.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, name).unwrap();
    }
    let there = test.there("copy");
    let expected = test.here("expected");
    for root in [&there, &expected] {
        for name in [
            "old/deep/x",
            "old/kept.o",
            "sub/extra",
            "z.o",
            "private/was/a/directory",
        ] {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "old").unwrap();
        }
        symlink("/etc", root.join("link-to-outside")).unwrap();
        // A directory in the place of a link, and a file in the place of a directory.
        fs::create_dir_all(root.join("dangling/x")).unwrap();
        fs::write(root.join("keep"), "").unwrap();
    }
    let rules = [
        "--delete",
        "--exclude=*.o",
        "--exclude=cache/",
        "--exclude=/top",
    ];
    let before = picture(&there);
    let mut dry = vec!["cp", "-an"];
    dry.extend(rules);
    dry.extend(["tree/.", ":copy"]);
    let planned = test.run(&dry).ok().text();
    assert_eq!(picture(&there), before, "a dry run changes nothing");
    for line in ["deleting sub/extra", "private\n", "keep/\n", "sub/link\n"] {
        assert!(planned.contains(line), "no {line:?} in {planned}");
    }
    assert!(!planned.contains(".o\n"), "{planned}");

    let mut args = vec!["cp", "-a"];
    args.extend(rules);
    args.extend(["tree/.", ":copy"]);
    test.run(&args).ok();
    let mut rsync = vec!["-aH"];
    rsync.extend(rules);
    rsync.extend(["tree/", "expected"]);
    reference("rsync", &rsync, &test.here(""));
    // The time of this directory is that of the removal in it.
    let without_old = |root| {
        let mut found = picture(root);
        found.remove(Path::new("old")).unwrap();
        found
    };
    assert_eq!(without_old(&there), without_old(&expected));
    test.run(&["cp", "-r", "--exclude", "a[", "tree", ":other"])
        .fails(1, &["a[", "exclude"]);
}

#[tokio::test]
async fn cp_understands_remote_patterns_and_home() {
    let there = tempfile::tempdir().unwrap();
    let home = there.path().canonicalize().unwrap().join("home");
    fs::create_dir_all(home.join("logs/old")).unwrap();
    for name in [
        "logs/a.log",
        "logs/b.log",
        "logs/.hidden.log",
        "logs/c.txt",
        "logs/old/a.log",
    ] {
        fs::write(home.join(name), name).unwrap();
    }
    let mut command = tokio::process::Command::new(BINARY);
    command.current_dir(there.path()).env("HOME", &home);
    let server = ServerProcess::start(command).await;
    let here = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(BINARY);
        command
            .args(args)
            .current_dir(here.path())
            .stdin(Stdio::null());
        see(command.env("EXEC_SERVER_URL", server.url()))
    };
    let names = || {
        let mut names: Vec<_> = fs::read_dir(here.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    run(&["cp", ":~/logs/*.log", "."]).ok();
    assert_eq!(names(), ["a.log", "b.log"]);
    fs::remove_file(here.path().join("b.log")).unwrap();
    run(&["cp", ":home/*/[b-c].*", "."]).ok();
    assert_eq!(names(), ["a.log", "b.log", "c.txt"]);
    run(&["cp", ":~/*/old/a.log", "deep"]).ok();
    assert_eq!(
        fs::read_to_string(here.path().join("deep")).unwrap(),
        "logs/old/a.log"
    );
    run(&["cp", ":~/logs/*.rs", "."]).fails(1, &["no file matches", "*.rs"]);
    run(&["cp", ":~/logs/*.log", "deep"]).fails(1, &["not a directory"]);
    run(&["cp", "deep", ":~"]).ok();
    assert!(home.join("deep").is_file());
    assert_eq!(
        run(&["fs", "cat", "~/logs/c.txt"]).ok().text(),
        "logs/c.txt"
    );
    // A name with the characters of a pattern.
    fs::write(home.join("[x]*"), "odd").unwrap();
    run(&["cp", ":~/[x]*", "odd"]).ok();
    assert_eq!(fs::read_to_string(here.path().join("odd")).unwrap(), "odd");
}

#[tokio::test]
async fn cp_copies_from_server_to_server() {
    let (one, other) = (CliFixture::new().await, CliFixture::new().await);
    tree(&one.there("tree"));
    let from = format!("{}:tree", one.server.url());
    let to = format!("{}:copy", other.server.url());
    one.run(&["cp", "-a", &from, &to]).ok();
    assert_eq!(picture(&other.there("copy")), picture(&one.there("tree")));
    let again = one.run(&["cp", "-av", &format!("{from}/."), &to]);
    assert!(again.err.contains("0 files copied"), "{again:?}");
    // An interrupted copy resumes.
    let image = fs::read(one.there("tree/sub/image")).unwrap();
    let part = other.there(".image.exec-server-part");
    fs::write(&part, &image[..5_000_000]).unwrap();
    let inode = fs::metadata(&part).unwrap().ino();
    one.run(&[
        "cp",
        &format!("{from}/sub/image"),
        &format!("{}:image", other.server.url()),
    ])
    .ok();
    assert!(fs::read(other.there("image")).unwrap() == image);
    assert_eq!(fs::metadata(other.there("image")).unwrap().ino(), inode);
    // Errors name the server.
    let missing = format!("{}:missing", one.server.url());
    one.run(&["cp", &missing, &to])
        .fails(1, &[one.server.url(), "missing", "No such file"]);
    // And within one server.
    one.run(&["cp", "-a", ":tree", ":again"]).ok();
    assert_eq!(picture(&one.there("again")), picture(&one.there("tree")));
    // Both to here.
    let both = [&from, &format!("{}:image", other.server.url())];
    fs::create_dir(one.here("both")).unwrap();
    one.run(&["cp", "-r", both[0], both[1], "both"]).ok();
    assert!(one.here("both/tree/private").is_file() && one.here("both/image").is_file());
}

/// A small filesystem in memory; unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]);
        let mounted = mount.arg(directory.path()).status().unwrap();
        assert!(mounted.success(), "cannot mount a filesystem");
        Self(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn full_disk_gives_one_error_that_says_how_to_resume() {
    let test = CliFixture::new().await;
    let disk = SmallDisk::new(16 << 20);
    fs::create_dir(test.here("tree")).unwrap();
    for number in 0..2000 {
        fs::write(test.here(format!("tree/{number}")), pattern(20_000)).unwrap();
    }
    let to = format!(":{}", disk.path("tree").display());
    let failed = test.run(&["cp", "-a", "tree", &to]);
    let text = failed.err.clone();
    failed.fails(
        1,
        &[
            "no space is left",
            "files are missing",
            "run the same command again",
        ],
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    let hidden = |directory: PathBuf| {
        let names = fs::read_dir(directory).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).count()
    };
    assert_eq!(hidden(disk.path("tree")), 0, "nothing incomplete is left");
    fs::remove_dir_all(disk.path("tree")).unwrap();

    // A large file, up and down.
    fs::write(test.here("image"), pattern(24 << 20)).unwrap();
    fs::write(test.there("image"), pattern(24 << 20)).unwrap();
    let target = disk.path("image");
    let there = format!(":{}", target.display());
    let part = disk.path(".image.exec-server-part");
    for args in [
        ["cp", "image", &there],
        ["cp", ":image", target.to_str().unwrap()],
    ] {
        let failed = test.run(&args);
        let text = failed.err.clone();
        failed.fails(
            1,
            &[
                "no space is left",
                part.to_str().unwrap(),
                "run the same command again",
            ],
        );
        assert_eq!(text.lines().count(), 1, "{text}");
        let kept = fs::metadata(&part).unwrap().len();
        assert!(kept > 8 << 20, "{kept}");
        let inode = fs::metadata(&part).unwrap().ino();
        // With more space the same command continues.
        let path = disk.0.path();
        reference(
            "mount",
            &["-o", "remount,size=64m", path.to_str().unwrap()],
            path,
        );
        test.run(&args).ok();
        assert_eq!(fs::metadata(&target).unwrap().ino(), inode);
        assert!(fs::read(&target).unwrap() == pattern(24 << 20));
        fs::remove_file(&target).unwrap();
        reference(
            "mount",
            &["-o", "remount,size=16m", path.to_str().unwrap()],
            path,
        );
    }
}

#[tokio::test]
async fn cp_limits_its_rate_and_writes_to_devices() {
    let test = CliFixture::new().await;
    fs::write(test.here("file"), pattern(3 << 20)).unwrap();
    let begun = Instant::now();
    test.run(&["cp", "--bwlimit", "2M", "file", ":file"]).ok();
    // The last block of 1 MiB is sent one second after the first.
    assert!(
        begun.elapsed() >= Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );
    test.run(&["cp", ":file", "/dev/null"]).ok();
    let null = fs::metadata("/dev/null").unwrap();
    assert!(!null.is_file() && null.len() == 0);
    assert_eq!(
        test.run(&["cp", "--bwlimit", "x", "file", ":"]).code,
        Some(2)
    );
}
