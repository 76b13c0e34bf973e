//! Tests of watched trees against the kernel, through a hub.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::task::Wake;

use exec_server_protocol::fs::ChangeKind;
use tempfile::TempDir;

use super::*;

/// Timeout of a wait; reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(30);

struct ChannelWaker(mpsc::SyncSender<()>);

impl Wake for ChannelWaker {
    fn wake(self: Arc<Self>) {
        let _ = self.0.try_send(());
    }
}

/// A subscription and the changes it received.
struct TestSubscriber {
    dir: PathBuf,
    subscription: WatchSubscription,
    waker: Waker,
    rung: mpsc::Receiver<()>,
    seq: u64,
    reported_changes: Vec<String>,
}

fn ignoring(gitignore: bool, patterns: &[&str]) -> WatchIgnore {
    WatchIgnore {
        gitignore,
        patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
    }
}

fn no_one_cancels() -> Arc<AtomicBool> {
    Arc::default()
}

impl TestSubscriber {
    fn new(hub: &WatchHub, dir: &Path, path: &Path, ignore: &WatchIgnore) -> Self {
        let debounce = Duration::from_millis(1);
        let subscription = hub
            .watch(path, true, ignore, debounce, &no_one_cancels())
            .unwrap();
        let (ring, rung) = mpsc::sync_channel(1);
        Self {
            dir: fs::canonicalize(dir).unwrap(),
            subscription,
            waker: Waker::from(Arc::new(ChannelWaker(ring))),
            rung,
            seq: 0,
            reported_changes: Vec::new(),
        }
    }

    fn of(dir: &TempDir) -> Self {
        Self::new(
            &WatchHub::default(),
            dir.path(),
            dir.path(),
            &ignoring(false, &[]),
        )
    }

    /// Waits for the next batch.
    fn step(&mut self) {
        let batch = loop {
            match self.subscription.take(&self.waker) {
                Some(batch) => break batch,
                None => self.rung.recv_timeout(TIMEOUT).unwrap_or_else(|_| {
                    let reported_changes =
                        &self.reported_changes[self.reported_changes.len().saturating_sub(20)..];
                    panic!("nothing more was told; at last {reported_changes:?}");
                }),
            }
        };
        self.seq += 1;
        assert_eq!(batch.seq, self.seq);
        assert!(batch.changes.len() <= MAX_CHANGES);
        for change in batch.changes {
            let path = self.name(&change.path);
            self.reported_changes
                .push(match (change.kind, &change.from) {
                    (ChangeKind::Renamed, Some(from)) => format!("{}>{path}", self.name(from)),
                    (ChangeKind::Created, None) => format!("+{path}"),
                    (ChangeKind::Modified, None) => format!("~{path}"),
                    (ChangeKind::Removed, None) => format!("-{path}"),
                    odd => panic!("{odd:?}"),
                });
        }
        if batch.overflow {
            self.reported_changes.push("lost".to_owned());
        }
    }

    fn name(&self, uri: &PathUri) -> String {
        let path = uri.to_native().unwrap();
        path.strip_prefix(&self.dir).unwrap().display().to_string()
    }

    /// Waits until a given change has been received.
    fn until(&mut self, what: &str) {
        while !self
            .reported_changes
            .iter()
            .any(|reported_changes| reported_changes == what)
        {
            self.step();
        }
    }

    /// Creates files until one is reported: after a loss there may be another, which covers them.
    fn wants_more(&mut self) {
        for number in 0.. {
            self.reported_changes.clear();
            let name = format!("after{number}");
            fs::write(self.subscription.root().join(&name), "").unwrap();
            let (reported_changes, lost) = (format!("+{name}"), "lost".to_owned());
            while !self.reported_changes.contains(&lost) {
                if self.reported_changes.contains(&reported_changes) {
                    return;
                }
                self.step();
            }
        }
    }

    /// Creates a marker file and returns the changes received before its report.
    fn so_far(&mut self) -> Vec<String> {
        let root = self.subscription.root().to_owned();
        let mark = format!("mark{}", self.seq);
        fs::write(root.join(&mark), "").unwrap();
        let name = root.join(&mark);
        let name = name.strip_prefix(&self.dir).unwrap().display().to_string();
        self.until(&format!("+{name}"));
        let reported_changes = std::mem::take(&mut self.reported_changes);
        reported_changes
            .into_iter()
            .filter(|reported_changes| !reported_changes.contains("mark"))
            .collect()
    }
}

#[test]
fn changes_are_reported_with_kind_and_path() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("d")).unwrap();
    fs::write(at("old"), "").unwrap();
    fs::write(at("d/gone"), "").unwrap();
    let mut seen = TestSubscriber::of(&dir);
    fs::write(at("d/new"), "x").unwrap();
    seen.until("+d/new");
    fs::write(at("old"), "x").unwrap();
    seen.until("~old");
    fs::remove_file(at("d/gone")).unwrap();
    seen.until("-d/gone");
    fs::rename(at("old"), at("d/moved")).unwrap();
    seen.until("old>d/moved");
    fs::create_dir(at("e")).unwrap();
    seen.until("+e");
    fs::rename(at("d"), at("e/d")).unwrap();
    seen.until("d>e/d");
    fs::write(at("e/d/after"), "").unwrap();
    seen.until("+e/d/after");
    // Moved in from outside the tree, and out again.
    let other = tempfile::tempdir().unwrap();
    fs::create_dir(other.path().join("in")).unwrap();
    fs::write(other.path().join("in/file"), "").unwrap();
    fs::rename(other.path().join("in"), at("in")).unwrap();
    seen.until("+in/file");
    fs::rename(at("e"), other.path().join("e")).unwrap();
    seen.until("-e");
    fs::write(other.path().join("e/d/unseen"), "").unwrap();
    fs::write(at("in/more"), "").unwrap();
    seen.until("+in/more");
    let reported_changes = seen.so_far();
    assert!(
        !reported_changes
            .iter()
            .any(|reported_changes| reported_changes.contains("unseen")),
        "{reported_changes:?}"
    );
}

#[test]
fn files_in_new_directories_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = TestSubscriber::of(&dir);
    let mut expected = BTreeSet::new();
    for number in 0..200 {
        let path = dir.path().join(format!("{number}/a/b"));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        for name in ["", "/a", "/a/b", "/a/b/file"] {
            expected.insert(format!("+{number}{name}"));
        }
    }
    let reported_changes = seen.so_far();
    let mut known: BTreeSet<String> = reported_changes.into_iter().collect();
    // The changes of those directories may arrive after that of the marker.
    while !expected.is_subset(&known) {
        seen.step();
        known.extend(seen.reported_changes.drain(..));
    }
}

#[test]
fn replaced_directory_is_still_watched() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("d/deep")).unwrap();
    let mut seen = TestSubscriber::of(&dir);
    for _ in 0..10 {
        // An open file keeps the old directory from disappearing immediately.
        let _inside = fs::File::open(at("d")).unwrap();
        fs::remove_dir_all(at("d")).unwrap();
        fs::create_dir_all(at("d/deep")).unwrap();
        fs::write(at("d/deep/x"), "").unwrap();
        seen.until("+d/deep/x");
        seen.reported_changes.clear();
        fs::rename(at("d"), at("d.old")).unwrap();
        fs::create_dir_all(at("d/deep")).unwrap();
        fs::write(at("d/deep/y"), "").unwrap();
        seen.until("+d/deep/y");
        fs::write(at("d.old/deep/z"), "").unwrap();
        seen.until("+d.old/deep/z");
        fs::remove_dir_all(at("d.old")).unwrap();
        seen.until("-d.old");
        seen.reported_changes.clear();
    }
}

#[test]
fn replaced_root_is_still_watched() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("way/to/root/d")).unwrap();
    let hub = WatchHub::default();
    let mut seen = TestSubscriber::new(&hub, dir.path(), &at("way/to/root"), &ignoring(false, &[]));
    for round in 0..5 {
        let _inside = (round % 2 == 0).then(|| fs::File::open(at("way/to/root")).unwrap());
        fs::remove_dir_all(at("way/to/root")).unwrap();
        seen.until("-way/to/root");
        fs::create_dir_all(at("way/to/root/d")).unwrap();
        fs::write(at("way/to/root/d/x"), "").unwrap();
        seen.until("+way/to/root/d/x");
        seen.reported_changes.clear();
        // Renamed, and another directory in its place.
        fs::rename(at("way/to/root"), at("away")).unwrap();
        fs::create_dir_all(at("way/to/root/d")).unwrap();
        fs::write(at("way/to/root/d/y"), "").unwrap();
        seen.until("+way/to/root/d/y");
        seen.reported_changes.clear();
        fs::remove_dir_all(at("away")).unwrap();
        // Together with its parent directories.
        fs::rename(at("way"), at("away")).unwrap();
        seen.until("-way/to/root");
        fs::write(at("away/to/root/d/unseen"), "").unwrap();
        fs::create_dir(at("way")).unwrap();
        fs::create_dir(at("way/to")).unwrap();
        fs::rename(at("away/to/root"), at("way/to/root")).unwrap();
        seen.until("+way/to/root/d/unseen");
        fs::remove_dir_all(at("away")).unwrap();
        seen.reported_changes.clear();
        fs::write(at("way/to/root/d/unseen"), "x").unwrap();
        seen.until("~way/to/root/d/unseen");
        seen.reported_changes.clear();
    }
}

#[test]
fn regular_file_is_watched_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "").unwrap();
    fs::write(at("other"), "").unwrap();
    let hub = WatchHub::default();
    let mut seen = TestSubscriber::new(&hub, dir.path(), &at("file"), &ignoring(false, &[]));
    fs::write(at("other"), "x").unwrap();
    fs::write(at("file"), "x").unwrap();
    seen.until("~file");
    fs::write(at("aside"), "x").unwrap();
    fs::rename(at("aside"), at("file")).unwrap();
    seen.until("+file");
    fs::remove_file(at("file")).unwrap();
    seen.until("-file");
    seen.reported_changes.clear();
    fs::write(at("file"), "").unwrap();
    seen.until("+file");
    assert!(
        seen.reported_changes
            .iter()
            .all(|reported_changes| reported_changes.ends_with("file")),
        "{:?}",
        seen.reported_changes
    );
}

struct DiscardChanges;

impl ChangeReceiver for DiscardChanges {
    fn report(&self, _: ReportedChange<'_>) {}
}

fn registered(dir: &Path, ignore: &WatchIgnore) -> WatchedTree<DiscardChanges> {
    let target = WatchTarget::new(fs::canonicalize(dir).unwrap(), true).unwrap();
    let filter = IgnoreFilter::new(target.base(), ignore).unwrap();
    WatchedTree::start(target, filter, DiscardChanges, no_one_cancels()).unwrap()
}

fn below(tree: &WatchedTree<DiscardChanges>, dir: &Path) -> Vec<String> {
    let dir = fs::canonicalize(dir).unwrap();
    let directories = tree.directories();
    let name = |path: &PathBuf| path.strip_prefix(&dir).unwrap().display().to_string();
    directories.iter().map(name).collect()
}

/// Creates a file in a directory that is registered and not yet read: when the second of two
/// directories is reported, the first is in that state.
struct ConcurrentCreator {
    pending: Arc<Mutex<PendingChanges>>,
    first: Mutex<Option<PathBuf>>,
}

impl ChangeReceiver for ConcurrentCreator {
    fn report(&self, reported: ReportedChange<'_>) {
        if let ReportedChange::Created { path, .. } = reported
            && path.parent().is_some_and(|parent| parent.ends_with("new"))
        {
            let mut first = self.first.lock();
            match &*first {
                None => *first = Some(path.to_owned()),
                Some(first) => fs::write(first.join("file"), "").unwrap(),
            }
        }
        self.pending.lock().record(reported);
    }
}

#[test]
fn removal_of_file_seen_by_scan_and_event_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(dir.path()).unwrap();
    let pending = Arc::default();
    let meddler = ConcurrentCreator {
        pending: Arc::clone(&pending),
        first: Mutex::default(),
    };
    let target = WatchTarget::new(root.clone(), true).unwrap();
    let filter = IgnoreFilter::new(target.base(), &ignoring(false, &[])).unwrap();
    let mut tree = WatchedTree::start(target, filter, meddler, no_one_cancels()).unwrap();
    let mut buffer = EventBuffer::new();
    while tree.turn(&mut buffer) {}
    let aside = tempfile::tempdir().unwrap();
    for name in ["new/a", "new/b"] {
        fs::create_dir_all(aside.path().join(name)).unwrap();
    }
    fs::rename(aside.path().join("new"), root.join("new")).unwrap();
    // Handle only the event of the directory; the event of the file is in the queue now.
    tree.turn(&mut buffer);
    let reported_changes = |kind| {
        let (changes, overflow) = pending.lock().take(usize::MAX, usize::MAX);
        assert!(!overflow);
        let reported_changes = changes.into_iter().filter(|change| change.kind == kind);
        let files = reported_changes.filter(|change| change.path.ends_with("file"));
        files.map(|change| change.path).collect::<Vec<_>>()
    };
    let created = reported_changes(ChangeKind::Created);
    assert_eq!(created.len(), 1, "{created:?}");
    fs::remove_file(&created[0]).unwrap();
    while tree.turn(&mut buffer) {}
    assert_eq!(reported_changes(ChangeKind::Removed), created);
    // A file that is created there again is new.
    fs::write(&created[0], "").unwrap();
    while tree.turn(&mut buffer) {}
    assert_eq!(reported_changes(ChangeKind::Created), created);
}

#[test]
fn short_lived_files_in_new_directories_are_reported_as_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = TestSubscriber::of(&dir);
    let mut known: BTreeSet<String> = BTreeSet::new();
    for number in 0..300 {
        let new = dir.path().join(format!("{number}/d"));
        fs::create_dir_all(&new).unwrap();
        for name in ["x", "y"] {
            fs::write(new.join(name), "").unwrap();
        }
        fs::remove_file(new.join("x")).unwrap();
        if number % 7 == 0 {
            fs::remove_dir_all(&new).unwrap();
            fs::create_dir(&new).unwrap();
            fs::write(new.join("z"), "").unwrap();
        }
    }
    let expected: BTreeSet<String> = (0..300)
        .flat_map(|number| {
            let file = if number % 7 == 0 { "z" } else { "y" };
            ["", "/d", &format!("/d/{file}")].map(|name| format!("{number}{name}"))
        })
        .collect();
    while known != expected {
        seen.step();
        for reported_changes in seen.reported_changes.drain(..) {
            let (kind, path) = reported_changes.split_at(1);
            match kind {
                "+" | "~" => {
                    known.insert(path.to_owned());
                }
                "-" => known.retain(|one| !Path::new(one).starts_with(path)),
                _ => panic!("{reported_changes}"),
            }
        }
    }
}

/// Lets a tree handle events until it has registered these directories.
fn settles(tree: &mut WatchedTree<DiscardChanges>, dir: &Path, expected: &[&str]) {
    let mut buffer = EventBuffer::new();
    let deadline = Instant::now() + TIMEOUT;
    while below(tree, dir) != expected {
        let seen = below(tree, dir);
        assert!(Instant::now() < deadline, "{seen:?}, not {expected:?}");
        let timeout = Timespec::try_from(Duration::from_millis(20)).unwrap();
        let mut descriptors = [PollFd::new(tree.inotify(), PollFlags::IN)];
        poll(&mut descriptors, Some(&timeout)).unwrap();
        tree.turn(&mut buffer);
    }
}

#[test]
fn ignored_directories_are_not_registered() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        ".git/objects",
        "src/deep",
        "target/debug",
        "src/gen",
        "node_modules/x",
    ] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join(".gitignore"), "/target\n").unwrap();
    fs::write(dir.path().join("src/.gitignore"), "gen/\n").unwrap();
    let mut tree = registered(dir.path(), &ignoring(true, &["node_modules"]));
    assert_eq!(below(&tree, dir.path()), ["", "src", "src/deep"]);
    // Changed rules take effect, in both directions.
    fs::write(dir.path().join("src/.gitignore"), "deep\n").unwrap();
    settles(&mut tree, dir.path(), &["", "src", "src/gen"]);
    fs::remove_file(dir.path().join("src/.gitignore")).unwrap();
    settles(&mut tree, dir.path(), &["", "src", "src/deep", "src/gen"]);
    fs::create_dir_all(dir.path().join("target/release")).unwrap();
    fs::rename(
        dir.path().join("src/gen"),
        dir.path().join("src/node_modules"),
    )
    .unwrap();
    settles(&mut tree, dir.path(), &["", "src", "src/deep"]);
    fs::rename(dir.path().join("target"), dir.path().join("tar")).unwrap();
    settles(
        &mut tree,
        dir.path(),
        &["", "src", "src/deep", "tar", "tar/debug", "tar/release"],
    );
    fs::remove_dir_all(dir.path().join("tar")).unwrap();
    settles(&mut tree, dir.path(), &["", "src", "src/deep"]);
    let everything = registered(dir.path(), &ignoring(false, &[]));
    assert!(below(&everything, dir.path()).contains(&".git/objects".to_owned()));
}

#[test]
fn changes_to_ignored_paths_are_not_reported() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at(".gitignore"), "*.log\nout/\n").unwrap();
    fs::create_dir(at("out")).unwrap();
    let hub = WatchHub::default();
    let ignore = ignoring(true, &["*.tmp"]);
    let mut seen = TestSubscriber::new(&hub, dir.path(), dir.path(), &ignore);
    fs::write(at("a.log"), "").unwrap();
    fs::write(at("a.tmp"), "").unwrap();
    fs::write(at("out/x"), "").unwrap();
    fs::write(at("kept"), "").unwrap();
    // Renamed from an ignored name to a visible one, and back.
    fs::rename(at("a.tmp"), at("shown")).unwrap();
    fs::rename(at("kept"), at("kept.log")).unwrap();
    fs::remove_file(at("a.log")).unwrap();
    let reported_changes = seen.so_far();
    let odd: Vec<_> = reported_changes
        .iter()
        .filter(|reported_changes| {
            !["+kept", "~kept", "-kept", "+shown", "~shown"].contains(&reported_changes.as_str())
        })
        .collect();
    assert!(
        odd.is_empty() && reported_changes.contains(&"+shown".to_owned()),
        "{reported_changes:?}"
    );
}

#[test]
fn shared_tree_ends_with_its_last_subscriber() {
    let dir = tempfile::tempdir().unwrap();
    let hub = WatchHub::default();
    let plain = ignoring(false, &[]);
    let mut one = TestSubscriber::new(&hub, dir.path(), dir.path(), &plain);
    let mut two = TestSubscriber::new(&hub, dir.path(), dir.path(), &plain);
    let other = TestSubscriber::new(&hub, dir.path(), dir.path(), &ignoring(true, &[]));
    assert!(Arc::ptr_eq(
        &one.subscription.shared_tree,
        &two.subscription.shared_tree
    ));
    assert!(!Arc::ptr_eq(
        &one.subscription.shared_tree,
        &other.subscription.shared_tree
    ));
    fs::write(dir.path().join("x"), "").unwrap();
    one.until("+x");
    two.until("+x");
    let shared = Arc::downgrade(&one.subscription.shared_tree.shared);
    drop(one);
    fs::write(dir.path().join("y"), "").unwrap();
    two.until("+y");
    drop(two);
    let deadline = Instant::now() + TIMEOUT;
    while shared.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the thread goes on");
        thread::yield_now();
    }
}

/// In memory if possible: some disks need a minute to create fifty thousand files.
fn quick_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

#[test]
fn burst_is_delivered_completely_or_as_overflow() {
    let dir = quick_dir();
    let mut seen = TestSubscriber::of(&dir);
    let mut expected = BTreeSet::new();
    for number in 0..50_000 {
        fs::write(dir.path().join(format!("f{number}")), "").unwrap();
        expected.insert(format!("+f{number}"));
    }
    fs::write(dir.path().join("last"), "").unwrap();
    while !seen
        .reported_changes
        .iter()
        .any(|reported_changes| reported_changes == "+last" || reported_changes == "lost")
    {
        seen.step();
    }
    let reported_changes: BTreeSet<String> = seen.reported_changes.drain(..).collect();
    assert!(reported_changes.contains("lost") || reported_changes.is_superset(&expected));
    seen.wants_more();
}

#[test]
fn slow_subscriber_receives_overflow() {
    let dir = quick_dir();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    fs::write(&one, "").unwrap();
    let mut seen = TestSubscriber::of(&dir);
    for _ in 0..40_000 {
        fs::rename(&one, &two).unwrap();
        fs::rename(&two, &one).unwrap();
    }
    seen.until("lost");
    seen.wants_more();
}

#[test]
fn watch_fails_with_a_specific_error() {
    let dir = tempfile::tempdir().unwrap();
    let hub = WatchHub::default();
    let watch = |path: &Path, ignore: &WatchIgnore| {
        hub.watch(path, true, ignore, Duration::ZERO, &no_one_cancels())
    };
    let missing = watch(&dir.path().join("no"), &ignoring(false, &[])).unwrap_err();
    assert!(
        matches!(missing, WatchError::Fs(FsError::Io { .. })),
        "{missing}"
    );
    let pattern = watch(dir.path(), &ignoring(false, &["{a"])).unwrap_err();
    assert!(matches!(pattern, WatchError::Pattern { .. }), "{pattern}");
    let full = WatchError::register(Path::new("/x"), Errno::NOSPC).to_string();
    let limit = limit("max_user_watches", "max_inotify_watches");
    assert!(limit > 0);
    for part in [
        "`/x`",
        "fs.inotify.max_user_watches is",
        &limit.to_string(),
        "sysctl",
    ] {
        assert!(full.contains(part), "{full}");
    }
    let mut trees = Vec::new();
    for number in 0..=MAX_TREES {
        let path = dir.path().join(number.to_string());
        fs::create_dir(&path).unwrap();
        match watch(&path, &ignoring(false, &[])) {
            Ok(tree) => trees.push(tree),
            // Other programs on this machine use instances too.
            Err(WatchError::TooMany | WatchError::Instances { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(trees.len() <= MAX_TREES);
    trees.clear();
    watch(dir.path(), &ignoring(false, &[])).unwrap();
    let cancelled = Arc::new(AtomicBool::new(true));
    let given_up = hub.watch(
        dir.path(),
        true,
        &ignoring(true, &[]),
        Duration::ZERO,
        &cancelled,
    );
    assert!(matches!(given_up, Err(WatchError::Cancelled)));
}

mod missing {
    use super::*;

    async fn fires(watch: MissingPathWait, act: impl FnOnce()) {
        let changed = tokio::spawn(watch.changed());
        act();
        tokio::time::timeout(TIMEOUT, changed)
            .await
            .expect("it to fire")
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn missing_path_wait_reports_only_its_own_paths() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let watch = |missing: &[&str], present: Option<&str>| {
            let missing = missing.iter().map(|name| at(name)).collect();
            MissingPathWait::start(missing, present.map(at)).unwrap()
        };
        fs::write(at("there"), "").unwrap();
        assert!(watch(&["a", "there"], None).is_none());
        assert!(watch(&["a"], Some("b")).is_none());
        let mut waits = Box::pin(watch(&["a/b/c"], Some("there")).unwrap().changed());
        fs::write(at("sibling"), "").unwrap();
        fs::remove_file(at("sibling")).unwrap();
        let timeout = Duration::from_millis(100);
        assert!(tokio::time::timeout(timeout, &mut waits).await.is_err());
        drop(waits);
        fires(watch(&["a/b/c"], None).unwrap(), || {
            fs::create_dir(at("a")).unwrap()
        })
        .await;
        fires(watch(&["x", "a/b/c"], None).unwrap(), || {
            fs::create_dir_all(at("a/b/c")).unwrap();
        })
        .await;
        fires(watch(&["m"], None).unwrap(), || {
            fs::rename(at("a"), at("m")).unwrap()
        })
        .await;
        fires(watch(&["x"], Some("there")).unwrap(), || {
            fs::write(at("there"), "x").unwrap()
        })
        .await;
        fs::write(at("new"), "").unwrap();
        fires(watch(&["x"], Some("there")).unwrap(), || {
            fs::rename(at("new"), at("there")).unwrap();
        })
        .await;
        fires(watch(&["x"], Some("there")).unwrap(), || {
            fs::remove_file(at("there")).unwrap()
        })
        .await;
        // The watched directory is removed, and created again with the awaited path.
        fires(watch(&["m/b/x"], None).unwrap(), || {
            fs::remove_dir_all(at("m")).unwrap();
            fs::create_dir_all(at("m/b")).unwrap();
            fs::write(at("m/b/x"), "").unwrap();
        })
        .await;
    }
}
