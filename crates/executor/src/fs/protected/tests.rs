use std::os::unix::fs::symlink;
use std::process::{Child, Command};

use exec_server_protocol::fs::{OpenMode, SearchParams, WalkOptions, WatchIgnore};
use proptest::prelude::*;
use tempfile::TempDir;

use super::super::watch::WatchHub;
use super::super::*;
use super::*;

const NO: CancelCheck<'static> = &|| false;

const LISTING: ListingFields = ListingFields {
    links: true,
    metadata: true,
};

const SECRET: &str = "secret-1234";

fn for_pattern(pattern: &str) -> SearchParams {
    SearchParams {
        path: PathUri::default(),
        pattern: pattern.to_owned(),
        regex: false,
        case_sensitive: true,
        globs: Vec::new(),
        gitignore: false,
        max_matches: 1000,
        context_lines: 0,
        sandbox: None,
    }
}

type Operation = (
    &'static str,
    Box<dyn Fn(&Path, &Path) -> Result<(), FsError>>,
);

/// Every file operation on a path; the second path is free for a copy.
fn operations() -> Vec<Operation> {
    fn named(
        name: &'static str,
        run: impl Fn(&Path, &Path) -> Result<(), FsError> + 'static,
    ) -> Operation {
        (name, Box::new(run))
    }
    let mut all = vec![
        named("open_file", |path, _| {
            open_file(path, SymlinkPolicy::Follow).map(drop)
        }),
        named("open_sized", |path, _| {
            open_sized(path, SymlinkPolicy::Follow).map(drop)
        }),
        named("metadata", |path, _| {
            metadata(path, SymlinkPolicy::Follow).map(drop)
        }),
        named("entry", |path, _| {
            entry(path, SymlinkPolicy::Follow).map(drop)
        }),
        named("hash", |path, _| hash(path, None, NO).map(drop)),
        named("canonicalize", |path, _| canonicalize(path).map(drop)),
        named("write_file", |path, _| {
            write_file(path, b"x", SymlinkPolicy::Follow, NewAttributes::default())
        }),
        named("set_metadata", |path, _| {
            let attributes = NewAttributes {
                mode: Some(0o777),
                modified_at_ms: Some(1),
                ..NewAttributes::default()
            };
            set_metadata(path, attributes, SymlinkPolicy::Follow)
        }),
        named("copy from", |path, free| copy(path, free, true, NO)),
        named("copy to", |path, free| {
            fs::write(free, "mine").unwrap();
            copy(free, path, true, NO)
        }),
        named("rename from", |path, free| rename(path, free, true, NO)),
        named("rename to", |path, free| {
            fs::write(free, "mine").unwrap();
            rename(free, path, true, NO)
        }),
        named("remove", |path, _| {
            remove(path, true, false, SymlinkPolicy::Follow)
        }),
        named("search", |path, _| {
            search::search(path, &for_pattern("x"), NO).map(drop)
        }),
        named("watch", |path, _| {
            let hub = WatchHub::default();
            let ignore = WatchIgnore::default();
            let watched = hub.watch(path, true, &ignore, Duration::ZERO, &Arc::default());
            match watched {
                Ok(_) => Ok(()),
                Err(watch::WatchError::Fs(error)) => Err(error),
                Err(other) => panic!("{other}"),
            }
        }),
    ];
    for (name, mode) in [
        ("open for reading", OpenMode::Read),
        ("open to replace", OpenMode::Replace),
        ("open to update", OpenMode::Update),
        ("open atomically", OpenMode::Atomic),
    ] {
        all.push(named(name, move |path, _| {
            OpenFile::open(path, mode, None).map(drop)
        }));
    }
    all
}

/// A directory with a token file, a directory with state, and other names for both.
struct Secrets {
    directory: TempDir,
}

impl Secrets {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let this = Self { directory };
        fs::create_dir_all(this.path("etc/state/deep")).unwrap();
        for name in ["etc/token", "etc/state/identity", "etc/state/deep/key"] {
            fs::write(this.path(name), SECRET).unwrap();
        }
        fs::write(this.path("ordinary"), "ordinary").unwrap();
        fs::hard_link(this.path("etc/token"), this.path("hard")).unwrap();
        symlink("etc/token", this.path("soft")).unwrap();
        symlink("etc", this.path("via")).unwrap();
        symlink("etc/state", this.path("to-state")).unwrap();
        protect_also([this.path("etc/token"), this.path("etc/state")]);
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn assert_unchanged(&self, what: &str) {
        for name in ["etc/token", "etc/state/identity", "etc/state/deep/key"] {
            let content = fs::read_to_string(self.path(name)).ok();
            assert_eq!(content.as_deref(), Some(SECRET), "{what}: {name}");
        }
        assert!(!self.path("free").exists(), "{what}");
    }
}

fn assert_refused(what: &str, path: &Path, outcome: Result<(), FsError>) {
    // The kernel refuses some of it to users other than root.
    let by_kernel = !rustix::process::geteuid().is_root()
        && matches!(&outcome, Err(FsError::Io { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied);
    assert!(
        by_kernel || matches!(outcome, Err(FsError::Protected(_))),
        "{what} {}: {outcome:?}",
        path.display()
    );
}

#[test]
fn secrets_are_out_of_reach_of_every_operation_under_every_name() {
    let secrets = Secrets::new();
    for (what, run) in operations() {
        for name in [
            "etc/token",
            "hard",
            "via/token",
            "via/../etc/token",
            "etc/state/identity",
            "etc/state/deep/key",
            "to-state/deep/key",
        ] {
            let path = secrets.path(name);
            let free = secrets.path("free");
            assert_refused(what, &path, run(&path, &free));
            let _ = fs::remove_file(&free);
            secrets.assert_unchanged(what);
        }
        // These change the link itself.
        let changes_link = ["copy from", "rename from", "rename to", "remove"];
        if !changes_link.contains(&what) {
            let path = secrets.path("soft");
            let free = secrets.path("free");
            assert_refused(what, &path, run(&path, &free));
            let _ = fs::remove_file(&free);
            secrets.assert_unchanged(what);
        }
    }
    let free = secrets.path("free");
    for directory in ["etc/state", "etc/state/deep", "to-state/deep"] {
        let path = secrets.path(directory);
        assert_refused(
            "list",
            &path,
            read_directory(&path, LISTING, usize::MAX, NO).map(drop),
        );
        let new = path.join("new");
        assert_refused(
            "create",
            &new,
            write_file(&new, b"x", SymlinkPolicy::Follow, NewAttributes::default()),
        );
        let direct = path.canonicalize().unwrap().join("new");
        for (new, links) in [
            (&new, SymlinkPolicy::Follow),
            (&direct, SymlinkPolicy::Refuse),
        ] {
            assert_refused("mkdir", new, create_directory(new, true, links, None));
            assert_refused("mkdir", new, create_directory(new, false, links, None));
        }
        assert_refused("link", &new, create_symlink(&new, &free));
        assert_refused(
            "update",
            &new,
            OpenFile::open(&new, OpenMode::Update, None).map(drop),
        );
    }
    // The directory around them must not be exchanged for another.
    for directory in ["etc", "etc/state"] {
        let path = secrets.path(directory);
        assert_refused("move", &path, rename(&path, &free, true, NO));
        assert_refused(
            "remove",
            &path,
            remove(&path, true, true, SymlinkPolicy::Follow),
        );
        assert_refused("copy", &path, copy(&path, &free, true, NO));
        let _ = fs::remove_dir_all(&free);
    }
    secrets.assert_unchanged("directories");
    // Other files of the same directory are not protected.
    assert!(open_file(&secrets.path("ordinary"), SymlinkPolicy::Follow).is_ok());
    let new = secrets.path("etc/new");
    write_file(&new, b"x", SymlinkPolicy::Follow, NewAttributes::default()).unwrap();
    remove(&new, false, false, SymlinkPolicy::Follow).unwrap();
}

#[test]
fn trees_with_secrets_are_listed_and_searched_without_them() {
    let secrets = Secrets::new();
    let options = WalkOptions {
        max_depth: 64,
        max_directories: 1000,
        max_entries: 1000,
        follow_directory_symlinks: true,
        prune_hidden_directories: false,
    };
    let walked = walk(&secrets.path(""), options, usize::MAX, NO).unwrap();
    for (directory, mut entries) in walked.directories() {
        assert!(!directory.ends_with("state"));
        assert!(entries.all(|(name, _)| name != "identity"));
    }
    assert!(!walked.errors.is_empty());
    let found = search::search(&secrets.path(""), &for_pattern("secret"), NO).unwrap();
    assert!(found.matches.is_empty(), "{:?}", found.matches);
}

#[test]
fn replaced_secret_is_protected_immediately() {
    let secrets = Secrets::new();
    let token = secrets.path("etc/token");
    for round in 0..20 {
        let new = secrets.path("etc/new");
        fs::write(&new, SECRET).unwrap();
        assert!(
            open_file(&new, SymlinkPolicy::Follow).is_ok(),
            "round {round}"
        );
        fs::rename(&new, &token).unwrap();
        assert_refused(
            "read",
            &token,
            open_file(&token, SymlinkPolicy::Follow).map(drop),
        );
        let added = secrets.path("etc/state/added");
        fs::write(&added, SECRET).unwrap();
        assert_refused(
            "read",
            &added,
            open_file(&added, SymlinkPolicy::Follow).map(drop),
        );
        fs::remove_file(&added).unwrap();
    }
    // A missing one must not be created by another.
    fs::remove_file(&token).unwrap();
    let written = write_file(
        &token,
        b"x",
        SymlinkPolicy::Follow,
        NewAttributes::default(),
    );
    assert_refused("write", &token, written);
    let opened = OpenFile::open(&token, OpenMode::Update, None).map(drop);
    assert_refused("open", &token, opened);
    assert_refused("link", &token, create_symlink(&token, Path::new("x")));
    let ordinary = secrets.path("ordinary");
    assert_refused("move", &token, rename(&ordinary, &token, false, NO));
    assert!(!token.exists() && ordinary.exists());
}

#[test]
fn links_on_the_way_to_a_secret_cannot_be_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().canonicalize().unwrap().join(name);
    fs::create_dir_all(at("mount/version-1")).unwrap();
    fs::write(at("mount/version-1/token"), SECRET).unwrap();
    symlink("version-1", at("mount/data")).unwrap();
    symlink("data/token", at("mount/token")).unwrap();
    protect_also([at("mount/token")]);
    for name in ["mount/token", "mount/data", "mount/version-1", "mount"] {
        let path = at(name);
        assert_refused(
            "remove",
            &path,
            remove(&path, true, false, SymlinkPolicy::Follow),
        );
        assert_refused("move", &path, rename(&path, &at("x"), true, NO));
    }
    // The owner of the secret may replace them.
    fs::create_dir(at("mount/version-2")).unwrap();
    fs::write(at("mount/version-2/token"), SECRET).unwrap();
    symlink("version-2", at("mount/new")).unwrap();
    fs::rename(at("mount/new"), at("mount/data")).unwrap();
    for name in ["mount/token", "mount/version-2/token"] {
        let path = at(name);
        assert_refused(
            "read",
            &path,
            open_file(&path, SymlinkPolicy::Follow).map(drop),
        );
    }
}

/// A child process that is killed when dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn entries_of_this_process_in_proc_are_out_of_reach() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("me");
    symlink("/proc/self", &link).unwrap();
    let deep = directory.path().join("deep");
    symlink(link.join("task"), &deep).unwrap();
    let pid = std::process::id();
    let thread = rustix::thread::gettid();
    let up = "../".repeat(16);
    let bases = [
        "/proc/self".to_owned(),
        "/proc/thread-self".to_owned(),
        format!("/proc/{pid}"),
        format!("/proc/{}", thread.as_raw_nonzero()),
        format!("/proc/self/task/{}", thread.as_raw_nonzero()),
        format!("/proc/{pid}/root/proc/self"),
        format!("/proc/{pid}/cwd/{up}proc/self"),
        link.display().to_string(),
        format!("{}/{}", deep.display(), thread.as_raw_nonzero()),
        format!("{}/{up}proc/self", directory.path().display()),
    ];
    let free = directory.path().join("free");
    for base in bases {
        for name in ["environ", "mem", "maps", "status", "cmdline", "comm"] {
            let path = Path::new(&base).join(name);
            for (what, run) in operations() {
                if what == "rename to" || what == "rename from" || what == "remove" {
                    // The kernel refuses these in any case.
                    assert!(run(&path, &free).is_err(), "{what} {}", path.display());
                } else {
                    assert_refused(what, &path, run(&path, &free));
                }
                let _ = fs::remove_file(&free);
            }
        }
        for name in ["", "fd", "fdinfo", "root", "cwd", "ns", "root/etc"] {
            let path = Path::new(&base).join(name);
            assert_refused(
                "list",
                &path,
                read_directory(&path, LISTING, usize::MAX, NO).map(drop),
            );
            assert_refused("canonicalize", &path, canonicalize(&path).map(drop));
        }
        for name in ["exe", "fd/0", "root/etc/passwd"] {
            let path = Path::new(&base).join(name);
            assert_refused(
                "metadata",
                &path,
                metadata(&path, SymlinkPolicy::Follow).map(drop),
            );
        }
    }
    assert_refused(
        "read",
        Path::new("/proc/kcore"),
        open_file(Path::new("/proc/kcore"), SymlinkPolicy::Follow)
            .map(drop)
            .map_err(|_| FsError::Protected(PathBuf::new())),
    );
}

#[test]
fn other_processes_in_proc_show_neither_memory_nor_environment() {
    let child = Sleeper(Command::new("sleep").arg("600").spawn().unwrap());
    let base = PathBuf::from(format!("/proc/{}", child.0.id()));
    for name in ["status", "stat", "cmdline", "limits"] {
        let path = base.join(name);
        assert!(open_file(&path, SymlinkPolicy::Follow).is_ok(), "{name}");
        let written = write_file(&path, b"x", SymlinkPolicy::Follow, NewAttributes::default());
        assert!(written.is_err(), "{name}");
    }
    for name in ["environ", "mem", "auxv", "cwd/x", "root/etc/passwd", "fd/0"] {
        let path = base.join(name);
        assert_refused(
            name,
            &path,
            open_file(&path, SymlinkPolicy::Follow).map(drop),
        );
    }
    let adjustment = base.join("oom_score_adj");
    let opened = OpenFile::open(&adjustment, OpenMode::Update, None).map(drop);
    assert_refused("write", &adjustment, opened);
    let version = open_file(Path::new("/proc/version"), SymlinkPolicy::Follow);
    assert!(version.is_ok());
}

#[test]
fn escapes_of_mountinfo_are_decoded() {
    assert_eq!(unescaped(b"/a\\040b\\134c"), Path::new("/a b\\c"));
    assert_eq!(unescaped(b"/a\\04"), Path::new("/a\\04"));
}

proptest! {
    /// Whatever links lead to a secret, by whatever path, it is not read.
    #[test]
    fn chains_of_links_do_not_lead_to_a_secret(
        hops in prop::collection::vec((0..4usize, any::<bool>()), 1..6),
    ) {
        let secrets = Secrets::new();
        let mut target = secrets.path("etc/token");
        for (index, (kind, relative)) in hops.into_iter().enumerate() {
            let directory = secrets.path(&format!("d{index}"));
            fs::create_dir(&directory).unwrap();
            let name = directory.join("link");
            match kind {
                0 => fs::hard_link(secrets.path("etc/token"), &name).unwrap(),
                1 => {
                    let above = Path::new("..").join(target.strip_prefix(secrets.path("")).unwrap());
                    symlink(if relative { above } else { target.clone() }, &name).unwrap();
                }
                2 => {
                    symlink(target.parent().unwrap(), directory.join("around")).unwrap();
                    let through = directory.join("around").join(target.file_name().unwrap());
                    symlink(through, &name).unwrap();
                }
                _ => symlink(secrets.path("via/token"), &name).unwrap(),
            }
            target = name;
        }
        let read = open_file(&target, SymlinkPolicy::Follow);
        prop_assert!(matches!(read, Err(FsError::Protected(_))), "{read:?}");
        let copied = copy(&target, &secrets.path("free"), false, NO);
        // A link is copied as a link.
        let is_link = fs::read_link(secrets.path("free")).is_ok();
prop_assert!(copied.is_err() || is_link);
    }
}
