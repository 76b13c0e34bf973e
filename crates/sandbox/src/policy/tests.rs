use std::collections::HashMap;

use exec_server_protocol::PathUri;
use proptest::prelude::*;

use super::*;

/// In-memory disk, defined by a list of paths.
#[derive(Debug, Default)]
pub(crate) struct MemoryDisk {
    kinds: BTreeMap<PathBuf, PathType>,
    texts: HashMap<PathBuf, Vec<u8>>,
    /// Directories with a mode that does not allow everything: reading is 4, searching 1.
    closed: HashMap<PathBuf, (u32, Owner)>,
}

impl MemoryDisk {
    /// Accepts `/dir/`, `/file`, `/file = text` and `/link -> target`; parents are added
    /// automatically.
    pub(crate) fn new(items: &[&str]) -> Self {
        let mut tree = Self::default();
        for item in items {
            let (path, kind) = if let Some((path, to)) = item.split_once(" -> ") {
                (path, PathType::Link(to.into()))
            } else if let Some((path, text)) = item.split_once(" = ") {
                tree.texts.insert(path.into(), text.as_bytes().to_vec());
                (path, PathType::File)
            } else if let Some(path) = item.strip_suffix('/') {
                (path, PathType::Directory)
            } else {
                (*item, PathType::File)
            };
            let path = PathBuf::from(path);
            for above in path.ancestors().skip(1) {
                tree.kinds
                    .entry(above.to_owned())
                    .or_insert(PathType::Directory);
            }
            tree.kinds.insert(path, kind);
        }
        tree
    }

    /// Gives a path this mode and owner.
    pub(crate) fn closed(mut self, path: &str, mode: u32, owner: Owner) -> Self {
        self.closed.insert(path.into(), (mode, owner));
        if mode & 4 != 0 {
            let child = Path::new(path).join("child");
            self.kinds.insert(child, PathType::File);
        }
        self
    }

    fn check(&self, path: &Path, wanted: u32) -> io::Result<()> {
        match self.closed.get(path) {
            Some((mode, _)) if mode & wanted == 0 => Err(io::ErrorKind::PermissionDenied.into()),
            _ => Ok(()),
        }
    }
}

impl Disk for MemoryDisk {
    fn kind(&self, path: &Path) -> io::Result<Option<PathType>> {
        for above in path.ancestors().skip(1) {
            self.check(above, 1)?;
        }
        Ok(self.kinds.get(path).cloned())
    }

    fn head(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.check(path, 4)?;
        self.texts
            .get(path)
            .cloned()
            .ok_or(io::ErrorKind::NotFound.into())
    }

    fn names(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.check(path, 4)?;
        let below = self
            .kinds
            .keys()
            .filter(|other| other.parent() == Some(path));
        Ok(below
            .filter_map(|other| other.file_name().map(ToOwned::to_owned))
            .collect())
    }

    fn owner(&self, path: &Path) -> io::Result<Owner> {
        Ok(self
            .closed
            .get(path)
            .map_or(Owner::Own, |&(_, owner)| owner))
    }
}

fn entry(path: &str, access: PathAccess) -> SandboxEntry {
    let special = |value| EntryPath::Special { value };
    let path = match path {
        "root" => special(SpecialPath::Root),
        "minimal" => special(SpecialPath::Minimal),
        "tmpdir" => special(SpecialPath::Tmpdir),
        "slash_tmp" => special(SpecialPath::SlashTmp),
        "unknown" => special(SpecialPath::Unknown {
            path: "/x".to_owned(),
            subpath: None,
        }),
        path => match path.strip_prefix("roots:") {
            Some(subpath) => special(SpecialPath::ProjectRoots {
                subpath: (!subpath.is_empty()).then(|| subpath.to_owned()),
            }),
            None => match path.strip_prefix("glob:") {
                Some(pattern) => EntryPath::GlobPattern {
                    pattern: pattern.to_owned(),
                },
                None => EntryPath::Path {
                    path: PathUri::parse(&format!("file://{path}")).unwrap(),
                },
            },
        },
    };
    SandboxEntry {
        path,
        access,
        missing_path_behavior: None,
    }
}

fn skip(mut entry: SandboxEntry) -> SandboxEntry {
    entry.missing_path_behavior = Some(MissingPathBehavior::Skip);
    entry
}

fn sandbox(entries: Vec<SandboxEntry>, roots: &[&str]) -> Sandbox {
    let mut sandbox = Sandbox::new(Permissions::Managed {
        file_system: FilePermissions::Restricted {
            entries,
            glob_scan_max_depth: None,
        },
        network: NetworkPermission::Restricted,
    });
    let uri = |path: &&str| PathUri::parse(&format!("file://{path}")).unwrap();
    sandbox.workspace_roots = roots.iter().map(uri).collect();
    sandbox
}

fn try_view(
    items: &[&str],
    entries: Vec<SandboxEntry>,
) -> Result<Option<AccessRules>, PolicyError> {
    let env = BTreeMap::from([("TMPDIR".to_owned(), "/var/t".to_owned())]);
    let tree = MemoryDisk::new(items);
    let context = PolicyDirectories {
        env: &env,
        disk: &tree,
        hidden: &[],
        reads_only: false,
    };
    Ok(resolve(&sandbox(entries, &["/w"]), &context)?.view)
}

fn view_of(items: &[&str], entries: Vec<SandboxEntry>) -> AccessRules {
    try_view(items, entries).unwrap().expect("a restriction")
}

fn access(view: &AccessRules, path: &str) -> PathAccess {
    view.access(Path::new(path))
}

use PathAccess::{Deny, Read, Write};

/// Entries that the real client sends for a workspace.
fn workspace() -> Vec<SandboxEntry> {
    let mut entries = vec![
        entry("root", Read),
        entry("roots:", Write),
        entry("slash_tmp", Write),
        entry("tmpdir", Write),
    ];
    entries.extend(PROTECTED.map(|name| skip(entry(&format!("roots:{name}"), Read))));
    entries
}

#[test]
fn workspace_is_writable_except_for_protected_names() {
    let view = view_of(
        &["/w/.git/config", "/w/src/x", "/tmp/", "/var/t/"],
        workspace(),
    );
    for (path, expected) in [
        ("/", Read),
        ("/etc/passwd", Read),
        ("/w", Write),
        ("/w/src/x", Write),
        ("/w/src/.git", Write),
        ("/w/.git/config", Read),
        ("/w/.codex", Read),
        ("/tmp/x", Write),
        ("/tmp/.aws", Read),
        ("/var/t", Write),
    ] {
        assert_eq!(access(&view, path), expected, "{path}");
    }
    assert!(!view.missing.contains(Path::new("/w/.git")));
    let missing = [
        "/w/.agents",
        "/w/.codex",
        "/w/.aws",
        "/tmp/.git",
        "/var/t/.codex",
    ];
    for path in missing {
        assert!(view.missing.contains(Path::new(path)), "{path}");
    }
}

#[test]
fn missing_special_paths_grant_nothing() {
    let view = view_of(&["/w/"], workspace());
    assert_eq!(access(&view, "/tmp/x"), Read);
    assert_eq!(access(&view, "/var/t/x"), Read);
    let without = sandbox(vec![entry("roots:", Write), entry("unknown", Write)], &[]);
    let tree = MemoryDisk::new(&["/w/"]);
    let context = PolicyDirectories {
        env: &BTreeMap::new(),
        disk: &tree,
        hidden: &[],
        reads_only: false,
    };
    let policy = resolve(&without, &context).unwrap();
    assert_eq!(policy.view, Some(AccessRules::default()));
}

#[test]
fn longest_entry_decides_and_deny_wins_for_equal_paths() {
    let view = view_of(
        &["/w/a/b/c/", "/x/"],
        vec![
            entry("root", Read),
            entry("/w", Write),
            entry("/w/a", Deny),
            entry("/w/a/b", Read),
            entry("/w/a/b/c", Write),
            entry("/x", Read),
            entry("/x", Write),
            entry("/x", Deny),
        ],
    );
    let expected = [
        ("/w/x", Write),
        ("/w/a/x", Deny),
        ("/w/a/b/x", Read),
        ("/w/a/b/c/x", Write),
        ("/x/y", Deny),
    ];
    for (path, expected) in expected {
        assert_eq!(access(&view, path), expected, "{path}");
    }
    let carved: Vec<_> = view.carve_outs().map(|(path, _)| path.to_owned()).collect();
    assert!(carved.contains(&"/w/a".into()) && carved.contains(&"/x".into()));
    assert!(!carved.contains(&"/w/a/b".into()), "{carved:?}");
}

#[test]
fn writable_root_restricts_nothing_without_narrower_entries() {
    let all = |more: &[SandboxEntry]| {
        let mut entries = vec![entry("root", Write)];
        entries.extend_from_slice(more);
        try_view(&["/w/.git/", "/w/x.env"], entries).unwrap()
    };
    assert_eq!(all(&[]), None);
    assert_eq!(all(&[entry("/w", Write), entry("/w", Read)]), None);
    assert_eq!(all(&[entry("minimal", Read)]), None);
    for narrow in [
        entry("/w", Read),
        entry("/w", Deny),
        entry("roots:.git", Read),
        entry("glob:/w/*.env", Deny),
    ] {
        assert!(all(std::slice::from_ref(&narrow)).is_some(), "{narrow:?}");
    }
    let masked = all(&[entry("glob:/w/*.env", Deny)]).unwrap();
    assert_eq!(access(&masked, "/w/x.env"), Deny);
    assert_eq!(access(&masked, "/w/y.env"), Write);
}

#[test]
fn explicit_entry_makes_a_protected_name_writable() {
    let mut entries = workspace();
    entries.push(entry("roots:.git", Write));
    let view = view_of(&["/w/.git/x", "/w/.codex/"], entries);
    assert_eq!(access(&view, "/w/.git/x"), Write);
    assert_eq!(access(&view, "/w/.codex"), Read);
}

#[test]
fn entry_below_a_protected_name_makes_only_its_own_path_writable() {
    let mut entries = workspace();
    entries.retain(|entry| entry.access == Write || entry.path == self::entry("root", Read).path);
    entries.push(entry("/w/.git/objects", Write));
    let view = view_of(&["/w/.git/objects/"], entries.clone());
    assert_eq!(access(&view, "/w/.git/objects/x"), Write);
    assert_eq!(access(&view, "/w/.git/hooks"), Read);
    assert_eq!(access(&view, "/w/.git"), Read);
    // While `.git` does not exist, the entry grants nothing.
    let view = view_of(&["/w/"], entries);
    assert!(view.missing.contains(Path::new("/w/.git")));
}

/// Resolves the workspace's policy on a disk.
fn workspace_on(tree: &MemoryDisk) -> Result<AccessRules, PolicyError> {
    let context = PolicyDirectories {
        env: &BTreeMap::new(),
        disk: tree,
        hidden: &[],
        reads_only: false,
    };
    let mut entries = workspace_without_git();
    entries.push(entry("slash_tmp", Write));
    let policy = resolve(&sandbox(entries, &["/w"]), &context)?;
    Ok(policy.view.unwrap())
}

#[test]
fn protected_names_of_other_users_do_not_decide_what_is_writable() {
    let other = Owner::Other;
    // A link to itself, to a directory that is not accessible, to the workspace; a `.git` file.
    let items = [
        "/w/src/",
        "/tmp/.codex -> .codex",
        "/tmp/.aws -> /root/x",
        "/tmp/.agents -> /w/src",
        "/tmp/.git = gitdir: /w/src",
    ];
    let tree = MemoryDisk::new(&items)
        .closed("/root", 0, Owner::Root)
        .closed("/tmp/.codex", 7, other)
        .closed("/tmp/.aws", 7, other)
        .closed("/tmp/.agents", 7, other)
        .closed("/tmp/.git", 7, other);
    let view = workspace_on(&tree).unwrap();
    for name in [".codex", ".aws", ".agents"] {
        let path = Path::new("/tmp").join(name);
        assert!(view.pins.contains(&path), "{name}");
    }
    assert_eq!(access(&view, "/w/src/x"), Write);
    assert_eq!(access(&view, "/tmp/.git"), Read);
    // The user's own links still protect their targets.
    let tree = MemoryDisk::new(&["/w/src/", "/w/.codex -> src"]);
    assert_eq!(access(&workspace_on(&tree).unwrap(), "/w/src/x"), Read);
}

#[test]
fn protected_links_that_lead_nowhere_are_pinned() {
    let tree = MemoryDisk::new(&["/w/", "/w/.codex -> .codex", "/w/.aws -> /root/x"]);
    let tree = tree.closed("/root", 0, Owner::Root);
    let view = workspace_on(&tree).unwrap();
    assert!(view.pins.contains(Path::new("/w/.codex")));
    assert!(view.pins.contains(Path::new("/w/.aws")));
}

#[test]
fn protected_names_that_cannot_be_examined_are_refused() {
    let own = Owner::Own;
    for (items, path) in [
        (["/w/", "/w/x"], "/w"),
        (["/w/.codex -> sub/x", "/w/sub/"], "/w/sub"),
        (["/w/.git = gitdir: real", "/w/real/"], "/w/.git"),
    ] {
        let tree = MemoryDisk::new(&items).closed(path, 0, own);
        let error = workspace_on(&tree).unwrap_err();
        assert!(matches!(error, PolicyError::Disk { .. }), "{path}: {error}");
    }
}

#[test]
fn git_file_makes_its_target_directory_read_only() {
    // With an entry for `.git`, as clients send it, and without.
    for entries in [workspace(), workspace_without_git()] {
        let view = view_of(
            &["/w/.git = gitdir: ../w/real/git\n", "/w/real/git/config"],
            entries,
        );
        assert_eq!(access(&view, "/w/.git"), Read);
        assert_eq!(access(&view, "/w/real/git/config"), Read);
        assert_eq!(access(&view, "/w/real"), Write);
    }
}

#[test]
fn protected_link_is_pinned_and_its_target_read_only() {
    let view = view_of(
        &["/w/.git -> real", "/w/real/config"],
        workspace_without_git(),
    );
    assert!(view.pins.contains(Path::new("/w/.git")));
    assert_eq!(access(&view, "/w/real/config"), Read);
}

#[test]
fn resolve_rejects_planted_protected_link_to_hidden_files() {
    let entries = vec![
        entry("minimal", Read),
        entry("roots:", Write),
        entry("roots:.codex", Read),
    ];
    let items = ["/usr/x", "/w/.codex -> /root/keys", "/root/keys/key"];
    let refused = try_view(&items, entries).unwrap_err();
    assert!(matches!(refused, PolicyError::WritableLink { .. }));
}

fn workspace_without_git() -> Vec<SandboxEntry> {
    vec![entry("root", Read), entry("roots:", Write)]
}

#[test]
fn resolve_rejects_links_that_the_process_could_replace() {
    let refused = |entries: Vec<SandboxEntry>| {
        let items = ["/w/link -> /etc", "/etc/x", "/safe -> /w/dir", "/w/dir/"];
        try_view(&items, entries).unwrap_err().to_string()
    };
    for access in [Read, Write, Deny] {
        let mut entries = workspace();
        entries.push(entry("/w/link/x", access));
        let message = refused(entries);
        assert!(
            message.contains("crosses writable symlink `/w/link`"),
            "{message}"
        );
    }
    // A link that the sandboxed process cannot replace is followed.
    let mut entries = vec![entry("root", Read)];
    entries.push(entry("/safe", Write));
    let view = view_of(&["/safe -> /w/dir", "/w/dir/"], entries);
    assert_eq!(access(&view, "/w/dir/x"), Write);
    assert_eq!(access(&view, "/w/x"), Read);
}

#[test]
fn missing_read_only_path_in_writable_directory_must_not_be_created() {
    let mut entries = workspace();
    entries.push(entry("/w/not/there", Read));
    entries.push(entry("/etc/not/there", Deny));
    entries.push(skip(entry("/w/neither", Deny)));
    entries.push(entry("/w/nor", Write));
    let view = view_of(&["/w/", "/etc/x"], entries);
    assert!(view.missing.contains(Path::new("/w/not")));
    assert_eq!(access(&view, "/w/not/there"), Read);
    assert!(!view.rules.contains_key(Path::new("/etc/not")));
    assert_eq!(access(&view, "/w/neither"), Write);
    assert_eq!(access(&view, "/w/nor"), Write);
    assert!(!view.missing.contains(Path::new("/w/nor")));
}

#[test]
fn minimal_makes_platform_paths_and_their_links_readable() {
    let view = view_of(
        &["/bin -> usr/bin", "/usr/bin/sh", "/etc/x", "/home/me"],
        vec![entry("minimal", Read), entry("roots:", Read)],
    );
    assert_eq!(access(&view, "/usr/bin/sh"), Read);
    assert_eq!(access(&view, "/etc/x"), Read);
    assert_eq!(access(&view, "/home/me"), Deny);
    assert_eq!(view.links[Path::new("/bin")], Path::new("usr/bin"));
    assert!(view.hides());
}

#[test]
fn resolve_rejects_subpaths_outside_the_root_and_foreign_uris() {
    for subpath in ["../x", "/etc", "a/../../b"] {
        let error = try_view(&["/w/"], vec![entry(&format!("roots:{subpath}"), Read)]).unwrap_err();
        assert!(matches!(error, PolicyError::Subpath(_)), "{subpath}");
    }
    let foreign = SandboxEntry {
        path: EntryPath::Path {
            path: PathUri::parse("file:///C:/x").unwrap(),
        },
        access: Read,
        missing_path_behavior: None,
    };
    let error = try_view(&[], vec![foreign]).unwrap_err().to_string();
    assert!(
        error.starts_with("invalid sandbox permission path URI: "),
        "{error}"
    );
}

#[test]
fn hidden_files_are_denied_despite_a_write_entry() {
    let tree = MemoryDisk::new(&["/w/token", "/etc/x"]);
    let hidden = ["/w/token".into(), "/not/there".into()];
    let context = PolicyDirectories {
        env: &BTreeMap::new(),
        disk: &tree,
        hidden: &hidden,
        reads_only: false,
    };
    let mut entries = workspace();
    entries.push(entry("/w/token", Write));
    let view = resolve(&sandbox(entries, &["/w"]), &context)
        .unwrap()
        .view
        .unwrap();
    assert_eq!(access(&view, "/w/token"), Deny);
}

proptest! {
    /// Compares the result with the documented rule: the longest prefix decides, then deny before
    /// write before read; protected names may only restrict access.
    #[test]
    fn resolved_access_never_exceeds_the_entries(
        entries in prop::collection::vec(("(/[ab]){0,3}", 0..3u8), 1..8),
        path in "(/[abc]){1,4}",
    ) {
        let access_of = |number: u8| [Read, Write, Deny][usize::from(number)];
        let items: Vec<String> = entries.iter().map(|(path, _)| format!("{path}/")).collect();
        let items: Vec<&str> = items.iter().map(String::as_str).collect();
        let wire: Vec<SandboxEntry> = entries
            .iter()
            .map(|(path, number)| match path.as_str() {
                "" => entry("root", access_of(*number)),
                path => entry(path, access_of(*number)),
            })
            .collect();
        let path = Path::new(&path);
        let expected = entries
            .iter()
            .filter(|(entry, _)| path.starts_with(if entry.is_empty() { "/" } else { entry }))
            .max_by_key(|(entry, number)| (entry.len(), access_of(*number)))
            .map_or(Deny, |(_, number)| access_of(*number));
        let got = match try_view(&items, wire).unwrap() {
            Some(view) => view.access(path),
            None => Write,
        };
        prop_assert_eq!(got, expected);
    }
}
