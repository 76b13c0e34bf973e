use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

fn tree(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    // A separate repository, so that rules files above it do not apply.
    fs::create_dir(dir.path().join(".git")).unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn params(root: &Path, pattern: &str) -> SearchParams {
    SearchParams {
        path: PathUri::from_native(root).unwrap(),
        pattern: pattern.to_owned(),
        regex: true,
        case_sensitive: true,
        globs: Vec::new(),
        gitignore: true,
        max_matches: 1000,
        context_lines: 0,
        sandbox: None,
    }
}

fn run(root: &Path, change: impl FnOnce(&mut SearchParams)) -> SearchResult {
    let mut params = params(root, "needle");
    change(&mut params);
    search(root, &params, &|| false).unwrap()
}

/// `name:line:column` of each match.
fn places(root: &Path, result: &SearchResult) -> Vec<String> {
    let place = |found: &SearchMatch| {
        let path = found.path.to_native().unwrap();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        format!("{name}:{}:{}", found.line, found.column)
    };
    result.matches.iter().map(place).collect()
}

#[test]
fn matches_are_sorted_by_path_and_line() {
    let dir = tree(&[
        ("b.txt", "no\na needle\nneedle needle\n"),
        ("a/z.txt", "needle"),
        ("a.txt", "x\r\n needle\r\n"),
        ("none.txt", "nothing\n"),
    ]);
    let result = run(dir.path(), |_| ());
    let expected = ["a/z.txt:1:1", "a.txt:2:2", "b.txt:2:3", "b.txt:3:1"];
    assert_eq!(places(dir.path(), &result), expected);
    assert_eq!(result.matches[1].text, " needle");
    assert_eq!((result.files_searched, result.truncated), (4, false));
}

#[test]
fn pattern_options_change_the_matching() {
    let dir = tree(&[("f", "a.c\nabc\nA.C\n")]);
    let lines = |change: fn(&mut SearchParams)| {
        let result = run(dir.path(), |params| {
            params.pattern = "a.c".to_owned();
            change(params);
        });
        result.matches.iter().map(|m| m.line).collect::<Vec<_>>()
    };
    assert_eq!(lines(|_| ()), [1, 2]);
    assert_eq!(lines(|p| p.regex = false), [1]);
    assert_eq!(lines(|p| p.case_sensitive = false), [1, 2, 3]);
    assert_eq!(lines(|p| p.pattern = "^abc$".to_owned()), [2]);
    for bad in ["(", r"a\nb", r"\w{500}{500}"] {
        let params = params(dir.path(), bad);
        let error = search(dir.path(), &params, &|| false).unwrap_err();
        assert!(matches!(error, FsError::Params(_)), "{bad}: {error}");
        assert!(
            error.to_string().starts_with("invalid pattern: "),
            "{error}"
        );
    }
    let mut params = params(dir.path(), "x");
    params.globs = vec!["{a".to_owned()];
    let error = search(dir.path(), &params, &|| false).unwrap_err();
    assert!(matches!(error, FsError::Params(_)), "{error}");
    assert!(
        error.to_string().starts_with("invalid glob `{a`: "),
        "{error}"
    );
}

#[test]
fn ignored_hidden_and_binary_files_are_skipped() {
    let dir = tree(&[
        (".gitignore", "out/\n*.log\n!keep.log\n"),
        ("out/x", "needle"),
        ("a.log", "needle"),
        ("keep.log", "needle"),
        ("sub/.gitignore", "/own\n"),
        ("sub/own", "needle"),
        ("sub/sub/own", "needle"),
        (".hidden/x", "needle"),
        ("late", &format!("needle\n{}\0", "x\n".repeat(100_000))),
        ("early", "needle\0"),
    ]);
    symlink("keep.log", dir.path().join("link")).unwrap();
    let result = run(dir.path(), |_| ());
    assert_eq!(
        places(dir.path(), &result),
        ["keep.log:1:1", "sub/sub/own:1:1"]
    );
    let everything = run(dir.path(), |params| params.gitignore = false);
    assert_eq!(everything.matches.len(), 6);
    let one = run(dir.path(), |params| {
        params.globs = vec!["*.log".to_owned(), "!keep*".to_owned()];
        params.gitignore = false;
    });
    assert_eq!(places(dir.path(), &one), ["a.log:1:1"]);
    assert_eq!(one.files_searched, 1);
    // A file that the request names is searched, also through a link.
    assert_eq!(run(&dir.path().join("a.log"), |_| ()).matches.len(), 1);
    assert_eq!(run(&dir.path().join("link"), |_| ()).matches.len(), 1);
    symlink("sub", dir.path().join("way")).unwrap();
    assert_eq!(run(&dir.path().join("way"), |_| ()).matches.len(), 1);
    let missing = params(dir.path(), "x");
    let error = search(&dir.path().join("no"), &missing, &|| false);
    assert!(matches!(error, Err(FsError::Io { .. })));
}

#[test]
fn ignore_rules_above_the_root_apply_within_a_repository() {
    let top = tree(&[
        (".gitignore", "*.log\n"),
        ("repo/.gitignore", "*.tmp\n"),
        ("repo/.git/info/exclude", "mine\n"),
        ("repo/sub/a.log", "needle"),
        ("repo/sub/a.tmp", "needle"),
        ("repo/sub/mine", "needle"),
        ("repo/sub/b.c", "needle"),
        ("plain/a.log", "needle"),
        // A worktree in another directory uses the rules of the repository.
        ("other/.git", "gitdir: ../repo/.git/worktrees/other\n"),
        ("repo/.git/worktrees/other/commondir", "../..\n"),
        ("other/mine", "needle"),
        ("other/yours", "needle"),
    ]);
    let below = |name: &str| {
        let root = top.path().join(name);
        places(&root, &run(&root, |_| ()))
    };
    // The rules of one repository end at the root of the next, wherever the search begins.
    assert_eq!(below("repo/sub"), ["a.log:1:1", "b.c:1:1"]);
    assert_eq!(below("other"), ["yours:1:1"]);
    assert_eq!(below("plain"), [""; 0]);
    assert_eq!(
        below(""),
        ["other/yours:1:1", "repo/sub/a.log:1:1", "repo/sub/b.c:1:1"]
    );
    // Outside a repository, rules above the root do not apply.
    if !top
        .path()
        .ancestors()
        .skip(1)
        .any(|dir| dir.join(".git").exists())
    {
        fs::remove_dir(top.path().join(".git")).unwrap();
        assert_eq!(below("plain"), ["a.log:1:1"]);
    }
}

#[test]
fn rules_file_that_is_no_regular_file_is_ignored() {
    let dir = tree(&[
        ("pipe/a.log", "needle"),
        ("device/a.log", "needle"),
        ("linked/a.log", "needle"),
        ("directory/.gitignore/x", ""),
        ("directory/a.log", "needle"),
        ("repo/.git/info/x", ""),
        ("repo/a.log", "needle"),
        ("rules", "*.log\n"),
    ]);
    let at = |name: &str| dir.path().join(name);
    let pipe = |name: &str| {
        let (mode, kind) = (Mode::RUSR | Mode::WUSR, rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, mode, 0).unwrap();
    };
    pipe("pipe/.gitignore");
    pipe("repo/.git/info/exclude");
    symlink("/dev/zero", at("device/.gitignore")).unwrap();
    symlink("../rules", at("linked/.gitignore")).unwrap();
    let expected = ["device", "directory", "linked", "pipe", "repo"];
    let expected = expected.map(|name| format!("{name}/a.log:1:1"));
    assert_eq!(places(dir.path(), &run(dir.path(), |_| ())), expected);
    // For the root itself, and above it.
    pipe(".gitignore");
    for name in ["pipe", "repo"] {
        let root = at(name);
        assert_eq!(places(&root, &run(&root, |_| ())), ["a.log:1:1"]);
    }
}

#[test]
fn explicit_glob_overrides_ignore_rules() {
    let dir = tree(&[
        (".gitignore", "*.log\n"),
        ("a.log", "needle"),
        ("b.c", "needle"),
    ]);
    let one = run(dir.path(), |params| params.globs = vec!["*.log".to_owned()]);
    assert_eq!(places(dir.path(), &one), ["a.log:1:1"]);
}

#[test]
fn search_limits_are_exact_and_reported() {
    let mut text = String::new();
    for number in 1..=100 {
        writeln!(text, "needle {number}").unwrap();
    }
    let files: Vec<_> = (0..20).map(|n| (format!("f{n}"), text.clone())).collect();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    let dir = tree(&files);
    for (max, count, truncated) in [
        (0, 0, true),
        (1, 1, true),
        (1999, 1999, true),
        (2000, 2000, false),
        (9999, 2000, false),
    ] {
        let result = run(dir.path(), |params| params.max_matches = max);
        assert_eq!(
            (result.matches.len(), result.truncated),
            (count, truncated),
            "{max}"
        );
    }
    // The last match has its context lines, even if these are matches above the limit.
    let result = run(&dir.path().join("f0"), |params| {
        params.max_matches = 1;
        params.context_lines = 3;
    });
    assert_eq!(
        result.matches[0].after,
        ["needle 2", "needle 3", "needle 4"]
    );
    let long = "needle".repeat(1000);
    let lines = format!("{long}\n").repeat(3000);
    let dir = tree(&[
        ("long", &lines),
        ("wide", &format!("needle{}", "ü".repeat(9999))),
    ]);
    let result = run(dir.path(), |params| params.max_matches = 9999);
    assert!(
        result.truncated && result.matches.len() < 1100,
        "{}",
        result.matches.len()
    );
    assert!(long.starts_with(&result.matches[0].text) && result.matches[0].cut);
    let wide = run(&dir.path().join("wide"), |_| ());
    assert!(wide.matches[0].cut && wide.matches[0].text.ends_with('ü'));
}

#[test]
fn cancelled_search_stops_within_a_file() {
    let dir = tempfile::tempdir().unwrap();
    // A sparse file: gigabytes to read, no disk space, no line end.
    let file = File::create(dir.path().join("huge")).unwrap();
    file.set_len(1 << 40).unwrap();
    let result = search(dir.path(), &params(dir.path(), "x"), &|| true).unwrap();
    assert_eq!(result.matches, []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn context_lines_surround_the_match(lines in prop::collection::vec(any::<bool>(), 0..40),
        context in 0usize..5, max in 0usize..12) {
        let text: Vec<String> = lines
            .iter()
            .enumerate()
            .map(|(n, hit)| format!("{} {n}", if *hit { "needle" } else { "hay" }))
            .collect();
        let dir = tree(&[("f", &(text.join("\n") + "\n"))]);
        let result = run(dir.path(), |params| {
            params.context_lines = context;
            params.max_matches = max;
        });
        let hits: Vec<usize> = (0..lines.len()).filter(|&n| lines[n]).collect();
        prop_assert_eq!(result.truncated, hits.len() > max);
        prop_assert_eq!(result.matches.len(), hits.len().min(max));
        for (found, hit) in result.matches.iter().zip(hits) {
            prop_assert_eq!(found.line, hit as u64 + 1);
            prop_assert_eq!(&found.before, &text[hit.saturating_sub(context)..hit]);
            let end = (hit + 1 + context).min(text.len());
            prop_assert_eq!(&found.after, &text[hit + 1..end]);
        }
    }
}

#[test]
fn directory_that_is_swapped_for_a_link_does_not_lead_out_of_the_tree() {
    let outside = tree(&[("deep/f", "needle outside\n")]);
    let inside = tree(&[("d/deep/f", "needle inside\n")]);
    let (real, link) = (inside.path().join("d"), inside.path().join("link"));
    let (aside, done) = (inside.path().join("aside"), AtomicBool::new(false));
    symlink(outside.path(), &link).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                fs::rename(&real, &aside).unwrap();
                fs::rename(&link, &real).unwrap();
                fs::rename(&real, &link).unwrap();
                fs::rename(&aside, &real).unwrap();
            }
        });
        let mut texts = Vec::new();
        for _ in 0..2000 {
            let found = run(inside.path(), |params| params.gitignore = false);
            texts.extend(found.matches.into_iter().map(|one| one.text));
        }
        done.store(true, Ordering::Relaxed);
        assert!(!texts.is_empty());
        assert!(texts.iter().all(|text| text == "needle inside"));
    });
}
