//! Nested rules: paths denied inside allowed ones, and allowed again inside those.

use serde_json::json;

use crate::{SandboxFixture, ServerUser, entry, for_both, policy, special};

for_both! {
    nested_rules_apply_from_the_innermost_path,
    denied_file_is_listed_but_unreadable,
    glob_patterns_deny_matching_files,
    rule_for_one_file_makes_only_it_writable,
    denied_missing_paths_cannot_be_created,
    parents_of_a_denied_file_cannot_be_renamed,
    hard_links_do_not_bypass_rules,
}

async fn nested_rules_apply_from_the_innermost_path(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    for name in ["work/a", "work/a/b", "work/a/b/c", "work/a/b/c/d"] {
        fixture.make(name);
    }
    fixture.write("work/a/secret", "s");
    fixture.write("work/a/b/read", "r");
    let sandbox = fixture.workspace_and(&[
        entry(&fixture.path("work/a"), "deny"),
        entry(&fixture.path("work/a/b"), "read"),
        entry(&fixture.path("work/a/b/c"), "write"),
        entry(&fixture.path("work/a/b/c/d"), "none"),
    ]);
    let script = "ls a; cat a/secret; cat a/b/read; echo x > a/b/new; echo y > a/b/c/new; \
                  cat a/b/c/new; ls a/b/c/d; touch a/new";
    let outcome = fixture.sh(&sandbox, script).await;
    assert_eq!(outcome.stdout, "ry\n", "{outcome:?}");
    let errors: Vec<&str> = outcome
        .stderr
        .lines()
        .filter_map(|line| line.rsplit(": ").next())
        .collect();
    let (closed, fixed) = ("Permission denied", "Read-only file system");
    // A path below a denied directory does not exist for the command.
    let gone = "No such file or directory";
    assert_eq!(errors, [closed, gone, fixed, closed, fixed], "{outcome:?}");
    assert!(fixture.path("work/a/b/c/new").exists());
    assert_eq!(
        std::fs::read_dir(fixture.path("work/a")).unwrap().count(),
        2
    );
}

async fn denied_file_is_listed_but_unreadable(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    let sandbox = policy(
        vec![special("root", "read"), entry(&secret, "deny")],
        "restricted",
    );
    let outcome = fixture
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

async fn glob_patterns_deny_matching_files(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/sub");
    for name in ["work/a.env", "work/sub/b.env", "work/c.txt"] {
        fixture.write(name, "s");
    }
    let pattern = json!({"path": {"type": "glob_pattern", "pattern": "codex-project-roots://**/*.env"},
        "access": "deny"});
    let sandbox = fixture.workspace_and(&[pattern]);
    let outcome = fixture
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
    assert!(fixture.path("work/sub/b.env").exists() && fixture.path("work/a.env").exists());
}

async fn rule_for_one_file_makes_only_it_writable(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let file = fixture.write("other/file", "");
    let sandbox = policy(
        vec![special("root", "read"), entry(&file, "write")],
        "restricted",
    );
    let outcome = fixture
        .sh(&sandbox, "echo a > ../other/file; echo b > ../other/more")
        .await;
    assert!(outcome.denied, "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a\n");
    assert!(!fixture.path("other/more").exists());
}

async fn denied_missing_paths_cannot_be_created(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (absent, deep) = (fixture.path("work/absent"), fixture.path("work/deep/er"));
    let mut skipped = entry(&fixture.path("work/skipped"), "read");
    skipped["missing_path_behavior"] = json!("skip");
    let sandbox = fixture.workspace_and(&[entry(&absent, "deny"), entry(&deep, "read"), skipped]);
    let script =
        "mkdir absent; echo x > absent; mkdir -p deep/er; echo y > deep/x; echo z > skipped";
    let outcome = fixture.sh(&sandbox, script).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    exec_server_testkit::proc::eventually("an unchanged workspace", || {
        let names: Vec<_> = std::fs::read_dir(fixture.path("work")).unwrap().collect();
        if names.len() == 1 {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await;
    assert!(fixture.path("work/skipped").exists());
}

async fn parents_of_a_denied_file_cannot_be_renamed(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/a");
    fixture.make("work/a/b");
    let secret = fixture.write("work/a/b/secret", "s");
    let sandbox = fixture.workspace_and(&[entry(&secret, "deny")]);
    let outcome = fixture
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

async fn hard_links_do_not_bypass_rules(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("work/secret", "s");
    let outside = fixture.write("other/file", "o");
    let sandbox = fixture.workspace_and(&[entry(&secret, "deny")]);
    let script = format!(
        "ln secret l1; cat l1; ln {} l2; echo x >> l2",
        outside.display()
    );
    let outcome = fixture.sh(&sandbox, &script).await;
    assert_eq!(outcome.stdout, "", "{outcome:?}");
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "o");
    assert!(!fixture.path("work/l1").exists(), "{outcome:?}");
}
