use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn host() -> HostFeatures {
    HostFeatures {
        kernel: "6.12".to_owned(),
        user_namespaces: Ok(()),
        privileged_mounts: Err("not root".to_owned()),
        mount_api: Ok(()),
        network_namespaces: Ok(()),
        private_networks: Ok(()),
        proc_mountable: true,
        landlock: 7,
        seccomp: true,
    }
}

fn without_namespaces() -> HostFeatures {
    HostFeatures {
        user_namespaces: Err("the system says no".to_owned()),
        ..host()
    }
}

fn options() -> PlanOptions<'static> {
    PlanOptions {
        root: false,
        allow_partial: false,
        is_directory: &|_| true,
        network: None,
    }
}

fn policy(rules: &[(&str, PathAccess)]) -> ResolvedPolicy {
    let rules: BTreeMap<PathBuf, PathAccess> = rules
        .iter()
        .map(|&(path, access)| (path.into(), access))
        .collect();
    ResolvedPolicy {
        view: Some(AccessRules {
            rules,
            ..AccessRules::default()
        }),
        network: NetworkPermission::Restricted,
    }
}

use PathAccess::{Deny, Read, Write};

fn mounts(policy: &ResolvedPolicy) -> Vec<(String, MountKind)> {
    let (confinement, _) = build(policy, &host(), options()).unwrap();
    let mounts = confinement.namespaces.unwrap().mounts;
    let name = |path: &SystemText| String::from_utf8(path.clone()).unwrap();
    mounts
        .iter()
        .map(|mount| (name(&mount.path), mount.what.clone()))
        .collect()
}

#[test]
fn unrestricted_policy_needs_no_confinement() {
    let all = ResolvedPolicy {
        view: None,
        network: NetworkPermission::Enabled,
    };
    let (confinement, enforcement) = build(&all, &host(), options()).unwrap();
    assert_eq!(confinement, Confinement::default());
    assert_eq!(enforcement.level, EnforcementLevel::None);
}

#[test]
fn restricted_network_alone_uses_a_landlock_domain_and_a_seccomp_filter() {
    let policy = ResolvedPolicy {
        view: None,
        network: NetworkPermission::Restricted,
    };
    for host in [host(), without_namespaces()] {
        let (confinement, enforcement) = build(&policy, &host, options()).unwrap();
        assert!(confinement.namespaces.is_none() && !confinement.drop_capabilities);
        assert!(confinement.drop_machine_capabilities);
        let landlock = confinement.landlock.unwrap();
        assert!(landlock.scoped && !landlock.handle_write && !landlock.handle_read);
        assert_eq!(confinement.seccomp.len(), 1);
        assert_eq!(enforcement.level, EnforcementLevel::Full);
        assert_eq!(
            enforcement.mechanisms,
            ["capabilities", "landlock", "seccomp", "no_new_privs"]
        );
    }
    // Without a Landlock domain, namespaces separate the command from other processes.
    let old = |host: HostFeatures| HostFeatures {
        landlock: 5,
        ..host
    };
    let (confinement, enforcement) = build(&policy, &old(host()), options()).unwrap();
    assert_eq!(confinement.namespaces.unwrap().root, ViewRoot::Writable);
    assert_eq!(enforcement.level, EnforcementLevel::Full);
    let refused = build(&policy, &old(without_namespaces()), options());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("memory of other processes"), "{text}");
}

#[test]
fn landlock_without_namespaces_reports_metadata_that_stays_changeable() {
    let partial = PlanOptions {
        allow_partial: true,
        ..options()
    };
    let host = without_namespaces();
    let read_only = policy(&[("/", Read)]);
    let (confinement, enforcement) = build(&read_only, &host, partial).unwrap();
    assert_eq!(enforcement.level, EnforcementLevel::Full, "{enforcement:?}");
    let writable = policy(&[("/", Read), ("/w", Write)]);
    let (other, enforcement) = build(&writable, &host, partial).unwrap();
    assert_eq!(enforcement.level, EnforcementLevel::Partial);
    assert!(
        enforcement.missing[0].contains("modes, owners"),
        "{enforcement:?}"
    );
    // Only the first can do without changes of metadata.
    assert_ne!(confinement.seccomp, other.seccomp);
}

#[test]
fn carve_outs_are_mounted_after_the_writable_root() {
    let policy = policy(&[
        ("/", Read),
        ("/w", Write),
        ("/w/.git", Read),
        ("/w/no", Deny),
    ]);
    let mask = MountKind::Mask { points: Vec::new() };
    assert_eq!(
        mounts(&policy),
        [
            ("/w".to_owned(), MountKind::Writable),
            ("/w/.git".to_owned(), MountKind::ReadOnly),
            ("/w/no".to_owned(), mask),
        ]
    );
    let (confinement, enforcement) = build(&policy, &host(), options()).unwrap();
    let namespaces = confinement.namespaces.unwrap();
    assert_eq!(namespaces.root, ViewRoot::ReadOnly);
    assert!(namespaces.user && namespaces.network);
    let landlock = confinement.landlock.unwrap();
    assert!(landlock.rules.contains(&(b"/w".to_vec(), true)));
    assert_eq!(enforcement.level, EnforcementLevel::Full);
}

#[test]
fn directories_above_a_carve_out_cannot_be_renamed() {
    let policy = policy(&[("/", Read), ("/w", Write), ("/w/a/b/no", Deny)]);
    let paths: Vec<String> = mounts(&policy).into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths, ["/w", "/w/a", "/w/a/b", "/w/a/b/no"]);
}

#[test]
fn mask_has_mount_points_for_accessible_paths_below_it() {
    let policy = policy(&[
        ("/", Read),
        ("/a", Deny),
        ("/a/b/c", Write),
        ("/a/b/c/d", Read),
        ("/a/x", Deny),
    ]);
    let points = vec![(b"b/c".to_vec(), true)];
    assert_eq!(
        mounts(&policy),
        [
            ("/a".to_owned(), MountKind::Mask { points }),
            ("/a/b/c".to_owned(), MountKind::Writable),
            ("/a/b/c/d".to_owned(), MountKind::ReadOnly),
        ]
    );
}

#[test]
fn empty_root_has_links_and_mount_points_for_granted_paths() {
    let mut policy = policy(&[("/usr", Read), ("/w", Write), ("/w/.git", Read)]);
    let view = policy.view.as_mut().unwrap();
    view.links.insert("/bin".into(), "usr/bin".into());
    view.links.insert("/usr/x".into(), "y".into());
    let (confinement, _) = build(&policy, &host(), options()).unwrap();
    let ViewRoot::Empty { links, points } = confinement.namespaces.unwrap().root else {
        panic!("not empty");
    };
    assert_eq!(links, [(b"/bin".to_vec(), b"usr/bin".to_vec())]);
    assert_eq!(points, [(b"usr".to_vec(), true), (b"w".to_vec(), true)]);
}

#[test]
fn landlock_without_namespaces_enforces_the_rules_it_can_express() {
    let read_only = policy(&[("/", Read)]);
    let (confinement, enforcement) = build(&read_only, &without_namespaces(), options()).unwrap();
    assert!(confinement.namespaces.is_none());
    assert!(!confinement.landlock.unwrap().handle_read);
    assert_eq!(enforcement.level, EnforcementLevel::Full);

    let few = policy(&[("/usr", Read), ("/w", Write)]);
    let partial = PlanOptions {
        allow_partial: true,
        ..options()
    };
    let (confinement, _) = build(&few, &without_namespaces(), partial).unwrap();
    let landlock = confinement.landlock.unwrap();
    assert!(landlock.handle_read);
    assert!(landlock.rules.contains(&(b"/usr".to_vec(), false)));

    let carved = policy(&[("/", Read), ("/w", Write), ("/w/.git", Read)]);
    let refused = build(&carved, &without_namespaces(), options()).unwrap_err();
    assert!(refused.0.contains("`/w/.git`") && refused.0.contains("the system says no"));
    let (_, enforcement) = build(&carved, &without_namespaces(), partial).unwrap();
    assert_eq!(enforcement.level, EnforcementLevel::Partial);
    assert_eq!(enforcement.missing.len(), 2, "{enforcement:?}");
}

#[test]
fn private_network_requires_namespaces_even_with_partial_enforcement() {
    let network = PrivateNetwork {
        tcp: vec![1, 2],
        udp: vec![3],
        unix_sockets: false,
    };
    let private = PlanOptions {
        network: Some(&network),
        allow_partial: true,
        ..options()
    };
    let unrestricted = ResolvedPolicy {
        view: None,
        network: NetworkPermission::Enabled,
    };
    for policy in [unrestricted.clone(), policy(&[("/", Read)])] {
        let (confinement, enforcement) = build(&policy, &host(), private).unwrap();
        let namespaces = confinement.namespaces.unwrap();
        assert!(namespaces.network && confinement.drop_capabilities);
        assert_eq!(namespaces.listeners.tcp, [1, 2]);
        assert_eq!(namespaces.listeners.count(), 3);
        assert_eq!(confinement.seccomp.len(), 1);
        assert_eq!(enforcement.level, EnforcementLevel::Full);
        let names = &enforcement.mechanisms;
        assert!(names.contains(&"network_namespace".to_owned()), "{names:?}");
        let refused = build(&policy, &without_namespaces(), private).unwrap_err();
        assert!(refused.0.contains("managed network"), "{refused}");
        let mute = HostFeatures {
            private_networks: Err("no loopback".to_owned()),
            ..host()
        };
        let refused = build(&policy, &mute, private).unwrap_err();
        assert!(refused.0.contains("no loopback"), "{refused}");
    }
    let (confinement, _) = build(&unrestricted, &host(), private).unwrap();
    let namespaces = confinement.namespaces.unwrap();
    assert_eq!(
        (namespaces.root, namespaces.mounts),
        (ViewRoot::Writable, Vec::new())
    );
}

#[test]
fn build_refuses_policy_on_host_without_any_mechanism() {
    let host = HostFeatures::nothing("no");
    let partial = PlanOptions {
        allow_partial: true,
        ..options()
    };
    assert!(build(&policy(&[("/", Read)]), &host, partial).is_err());
    let old = HostFeatures {
        landlock: 2,
        ..without_namespaces()
    };
    let refused = build(&policy(&[("/", Read)]), &old, options()).unwrap_err();
    assert!(refused.0.contains("truncation"), "{refused}");
}

/// Returns the access to a path after all mounts: the last mount over it decides.
fn effective(root: &ViewRoot, mounts: &[ViewMount], path: &Path) -> PathAccess {
    let base = match root {
        ViewRoot::ReadOnly => Read,
        ViewRoot::Writable => Write,
        ViewRoot::Empty { .. } => Deny,
    };
    let over = mounts
        .iter()
        .rev()
        .find(|mount| path.starts_with(std::ffi::OsStr::from_bytes(&mount.path)));
    over.map_or(base, |mount| match mount.what {
        MountKind::ReadOnly | MountKind::Pin => Read,
        MountKind::Writable => Write,
        MountKind::Mask { .. } => Deny,
    })
}

proptest! {
    #[test]
    fn mounts_give_the_same_access_as_the_policy(
        rules in prop::collection::btree_map("(/[ab]){0,4}", 0..3u8, 1..10),
        path in "(/[abc]){1,5}",
    ) {
        let rules: Vec<(String, PathAccess)> = rules
            .into_iter()
            .map(|(path, access)| {
                let path = if path.is_empty() { "/".to_owned() } else { path };
                (path, [Read, Write, Deny][usize::from(access)])
            })
            .collect();
        let rules: Vec<(&str, PathAccess)> =
            rules.iter().map(|(path, access)| (path.as_str(), *access)).collect();
        let policy = policy(&rules);
        let view = policy.view.clone().unwrap();
        let (confinement, enforcement) = build(&policy, &host(), options()).unwrap();
        let namespaces = confinement.namespaces.unwrap();
        prop_assert_eq!(enforcement.level, EnforcementLevel::Full);
        let path = Path::new(&path);
        prop_assert_eq!(effective(&namespaces.root, &namespaces.mounts, path), view.access(path));
        // Every mount below a mask needs a mount point in the mask.
        for mount in &namespaces.mounts {
            let mounted = Path::new(std::ffi::OsStr::from_bytes(&mount.path));
            if matches!(mount.what, MountKind::Mask { .. }) {
                continue;
            }
            let above = namespaces.mounts.iter().rev().find(|other| {
                *other != mount && mounted.starts_with(std::ffi::OsStr::from_bytes(&other.path))
            });
            if let Some(ViewMount { path, what: MountKind::Mask { points } }) = above {
                let relative = mounted.strip_prefix(std::ffi::OsStr::from_bytes(path)).unwrap();
                prop_assert!(points.iter().any(|(point, _)| *point == text(relative)));
            }
        }
    }
}
