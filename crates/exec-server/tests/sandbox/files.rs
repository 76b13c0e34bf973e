//! Carve-outs: what is taken away inside what is given, and given again inside that.

use serde_json::json;

use crate::{Cell, User, entry, for_both, policy, special};

for_both! {
    carve_outs_nest,
    a_denied_file_is_there_but_closed,
    patterns_deny_what_they_match,
    a_writable_file_alone_is_writable,
    missing_paths_cannot_be_made,
    directories_above_cannot_be_swapped,
    hard_links_do_not_lead_out,
}

async fn carve_outs_nest(user: User) {
    let mut cell = Cell::new(user).await;
    for name in ["work/a", "work/a/b", "work/a/b/c", "work/a/b/c/d"] {
        cell.make(name);
    }
    cell.write("work/a/secret", "s");
    cell.write("work/a/b/read", "r");
    let sandbox = cell.workspace_and(&[
        entry(&cell.path("work/a"), "deny"),
        entry(&cell.path("work/a/b"), "read"),
        entry(&cell.path("work/a/b/c"), "write"),
        entry(&cell.path("work/a/b/c/d"), "none"),
    ]);
    let script = "ls a; cat a/secret; cat a/b/read; echo x > a/b/new; echo y > a/b/c/new; \
                  cat a/b/c/new; ls a/b/c/d; touch a/new";
    let outcome = cell.sh(&sandbox, script).await;
    assert_eq!(outcome.stdout, "ry\n", "{outcome:?}");
    let errors: Vec<&str> = outcome
        .stderr
        .lines()
        .filter_map(|line| line.rsplit(": ").next())
        .collect();
    let (closed, fixed) = ("Permission denied", "Read-only file system");
    // What a mask does not show is not there.
    let gone = "No such file or directory";
    assert_eq!(errors, [closed, gone, fixed, closed, fixed], "{outcome:?}");
    assert!(cell.path("work/a/b/c/new").exists());
    assert_eq!(std::fs::read_dir(cell.path("work/a")).unwrap().count(), 2);
}

async fn a_denied_file_is_there_but_closed(user: User) {
    let mut cell = Cell::new(user).await;
    let secret = cell.write("other/secret", "s");
    let sandbox = policy(
        vec![special("root", "read"), entry(&secret, "deny")],
        "restricted",
    );
    let outcome = cell
        .sh(
            &sandbox,
            "cat ../other/secret; wc -c < ../other/secret; ls ../other",
        )
        .await;
    assert_eq!(outcome.stdout, "secret\n", "{outcome:?}");
    assert_eq!(
        outcome.stderr.matches("Permission denied").count(),
        2,
        "{outcome:?}"
    );
}

async fn patterns_deny_what_they_match(user: User) {
    let mut cell = Cell::new(user).await;
    cell.make("work/sub");
    for name in ["work/a.env", "work/sub/b.env", "work/c.txt"] {
        cell.write(name, "s");
    }
    let pattern = json!({"path": {"type": "glob_pattern", "pattern": "codex-project-roots://**/*.env"},
        "access": "deny"});
    let sandbox = cell.workspace_and(&[pattern]);
    let outcome = cell
        .sh(
            &sandbox,
            "cat a.env; cat sub/b.env; cat c.txt; mv sub sub2; rm a.env",
        )
        .await;
    assert_eq!(outcome.stdout, "s", "{outcome:?}");
    assert_eq!(
        outcome.stderr.matches("Permission denied").count(),
        2,
        "{outcome:?}"
    );
    assert_eq!(outcome.stderr.matches("busy").count(), 2, "{outcome:?}");
    assert!(cell.path("work/sub/b.env").exists() && cell.path("work/a.env").exists());
}

async fn a_writable_file_alone_is_writable(user: User) {
    let mut cell = Cell::new(user).await;
    let file = cell.write("other/file", "");
    let sandbox = policy(
        vec![special("root", "read"), entry(&file, "write")],
        "restricted",
    );
    let outcome = cell
        .sh(&sandbox, "echo a > ../other/file; echo b > ../other/more")
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a\n");
    assert!(!cell.path("other/more").exists());
}

async fn missing_paths_cannot_be_made(user: User) {
    let mut cell = Cell::new(user).await;
    let (absent, deep) = (cell.path("work/absent"), cell.path("work/deep/er"));
    let mut skipped = entry(&cell.path("work/skipped"), "read");
    skipped["missing_path_behavior"] = json!("skip");
    let sandbox = cell.workspace_and(&[entry(&absent, "deny"), entry(&deep, "read"), skipped]);
    let script =
        "mkdir absent; echo x > absent; mkdir -p deep/er; echo y > deep/x; echo z > skipped";
    let outcome = cell.sh(&sandbox, script).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    exec_server_testkit::proc::eventually("an unchanged workspace", || {
        let names: Vec<_> = std::fs::read_dir(cell.path("work")).unwrap().collect();
        if names.len() == 1 {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await;
    assert!(cell.path("work/skipped").exists());
}

async fn directories_above_cannot_be_swapped(user: User) {
    let mut cell = Cell::new(user).await;
    cell.make("work/a");
    cell.make("work/a/b");
    let secret = cell.write("work/a/b/secret", "s");
    let sandbox = cell.workspace_and(&[entry(&secret, "deny")]);
    let outcome = cell
        .sh(
            &sandbox,
            "mv a c; mv a/b a/d; mv a/b/secret a/b/x; mv ../work ../gone",
        )
        .await;
    let busy = outcome.stderr.matches("busy").count();
    let fixed = outcome.stderr.matches("Read-only file system").count();
    assert_eq!((busy, busy + fixed), (3, 4), "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "s");
}

async fn hard_links_do_not_lead_out(user: User) {
    let mut cell = Cell::new(user).await;
    let secret = cell.write("work/secret", "s");
    let outside = cell.write("other/file", "o");
    let sandbox = cell.workspace_and(&[entry(&secret, "deny")]);
    let script = format!(
        "ln secret l1; cat l1; ln {} l2; echo x >> l2",
        outside.display()
    );
    let outcome = cell.sh(&sandbox, &script).await;
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "o");
    assert!(!cell.path("work/l1").exists(), "{outcome:?}");
}
