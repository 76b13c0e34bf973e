//! File requests and commands under the same policy reach the same files, over generated policies
//! and paths.

use std::path::Path;

use exec_server_testkit::wire::{StartBuilder, bytes};
use serde_json::{Value, json};

use crate::{SandboxFixture, ServerUser, entry, for_both, generated_entries, policy, special};

for_both! {
    file_requests_reach_the_same_files_as_commands,
    file_requests_under_a_policy_never_show_the_server,
    commands_cannot_read_memory_or_environment_of_the_server,
}

/// Value of a variable in the server's environment; see `SandboxFixture::at`.
const SERVER_SECRET: &str = "only for the server";

/// Generator of choices: SplitMix64.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

impl SandboxFixture {
    /// A policy that restricts files: reads everything or only system files, with writable and
    /// denied paths.
    fn generated_policy(&self, choices: &mut Choices) -> Value {
        let root = if choices.below(4) == 0 {
            special("minimal", "read")
        } else {
            special("root", "read")
        };
        let mut entries = vec![root];
        let paths = [
            "work",
            "work/sub",
            "work/sub/deep",
            "work/file",
            "other",
            "other/secret",
        ]
        .map(|name| self.path(name));
        entries.extend(generated_entries(&mut |count| choices.below(count), &paths));
        for (path, access) in [
            ("/proc", "deny"),
            ("/sys", "deny"),
            ("/etc/hostname", "deny"),
        ] {
            if choices.below(5) == 0 {
                entries.push(entry(Path::new(path), access));
            }
        }
        if choices.below(3) == 0 {
            let pattern = format!("{}/**/*.env", self.path("work").display());
            entries.push(json!({"path": {"type": "glob_pattern", "pattern": pattern},
                "access": "deny"}));
        }
        let mut sandbox = policy(entries, "restricted");
        sandbox["cwd"] = json!(format!("file://{}", self.path("work").display()));
        sandbox
    }

    /// The result of a file request, reduced to what a command can observe too.
    async fn reached(&mut self, sandbox: &Value, path: &str) -> String {
        let params = json!({"path": format!("file://{path}"), "sandbox": sandbox});
        match self.client.call("fs/readFile", params.clone()).await {
            Ok(read) => {
                let content = bytes(&read["dataBase64"]);
                return format!("file {}", String::from_utf8_lossy(&content));
            }
            Err(failure) if !failure.message.contains("is not a file") => {
                return format!("unreadable: {}", kind_of(&failure.message));
            }
            Err(_) => {}
        }
        match self.client.call("fs/readDirectory", params).await {
            Ok(listed) => {
                let names = listed["entries"].as_array().unwrap().iter();
                let mut names: Vec<_> = names
                    .filter_map(|one| one["fileName"].as_str().map(str::to_owned))
                    .filter(|name| !PLACEHOLDERS.contains(&name.as_str()))
                    .collect();
                names.sort();
                format!("directory {}", names.join(" "))
            }
            Err(failure) if failure.message.contains("Not a directory") => "device".to_owned(),
            Err(failure) => format!("unreadable: {}", kind_of(&failure.message)),
        }
    }
}

/// Names that are not compared: a command also sees the mount points of protected names, which exist
/// while it runs.
const PLACEHOLDERS: [&str; 4] = [".git", ".agents", ".aws", ".codex"];

/// The system's error in a message, without the path.
fn kind_of(message: &str) -> &str {
    message.split(" (os error").next().unwrap_or(message)
}

/// Python script that prints for each path the same text as `SandboxFixture::reached`.
const OBSERVE: &str = r#"
import stat
# Mount points of protected names, which exist while a command runs; file requests do not list them.
PLACEHOLDERS = {".git", ".agents", ".aws", ".codex"}
def name(e): return os.strerror(e.errno)
for path in PATHS:
    try:
        kind = os.stat(path).st_mode
    except OSError as e:
        print("unreadable: " + name(e)); continue
    if stat.S_ISREG(kind):
        try:
            print("file " + repr(open(path, "rb").read().decode("utf-8", "replace")))
        except OSError as e:
            print("unreadable: " + name(e))
    elif stat.S_ISDIR(kind):
        try:
            found = [n for n in sorted(os.listdir(path))
                if n not in PLACEHOLDERS and os.path.exists(os.path.join(path, n))]
            print("directory " + " ".join(found))
        except OSError as e:
            print("unreadable: " + name(e))
    else:
        print("device")
"#;

async fn file_requests_reach_the_same_files_as_commands(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/sub");
    fixture.make("work/sub/deep");
    for name in [
        "work/file",
        "work/a.env",
        "work/sub/b.env",
        "work/sub/deep/c",
        "other/secret",
        "other/open",
    ] {
        fixture.write(name, name);
    }
    for (name, target) in [
        ("work/to-secret", "../other/secret"),
        ("work/to-other", "../other"),
        ("work/to-proc", "/proc/self"),
        ("work/dangling", "nowhere"),
    ] {
        std::os::unix::fs::symlink(target, fixture.path(name)).unwrap();
    }
    let here = |name: &str| fixture.path(name).display().to_string();
    let mut paths: Vec<String> = [
        "work",
        "work/sub",
        "work/sub/deep/c",
        "work/file",
        "work/a.env",
        "work/sub/b.env",
        "work/to-secret",
        "work/to-other/open",
        "work/dangling",
        "other",
        "other/secret",
        "other/open",
    ]
    .into_iter()
    .map(here)
    .collect();
    let system = [
        "/etc/hostname",
        "/etc/shadow",
        "/dev",
        "/dev/null",
        "/dev/kmsg",
        "/dev/shm",
        "/proc/version",
        "/proc/kcore",
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/ostype",
        "/sys/kernel/notes",
        "/root",
    ];
    paths.extend(system.map(str::to_owned));
    let seed = 0x0025;
    let mut choices = Choices(seed);
    for round in 0..12 {
        let sandbox = fixture.generated_policy(&mut choices);
        let listed = serde_json::to_string(&paths).unwrap();
        let script = format!("{}\nPATHS = {listed}\n{OBSERVE}", crate::PRELUDE);
        let start = fixture.start_of(&sandbox, &["python3", "-c", &script]);
        // A working directory that every policy has.
        let observed = fixture.run(start.with("cwd", "file:///")).await;
        let observed: Vec<&str> = observed.stdout.lines().collect();
        assert_eq!(observed.len(), paths.len(), "round {round}: {observed:?}");
        for (path, command) in paths.iter().zip(observed) {
            let request = fixture.reached(&sandbox, path).await;
            let command = match command.strip_prefix("file ") {
                Some(literal) => format!("file {}", text_of(literal)),
                None => command.to_owned(),
            };
            // The content of a file in procfs may differ between two reads.
            let (request, command) = if path.starts_with("/proc") || path.starts_with("/sys") {
                (first_word(&request), first_word(&command))
            } else {
                (request.as_str(), command.as_str())
            };
            assert_eq!(request, command, "round {round}: {path} under {sandbox}");
        }
    }
}

fn first_word(text: &str) -> &str {
    text.split(' ').next().unwrap_or(text)
}

/// The text of a Python literal without escapes other than for line ends.
fn text_of(literal: &str) -> String {
    let inner = literal.trim_matches(['\'', '"']);
    inner.replace("\\n", "\n").replace("\\x00", "\0")
}

async fn file_requests_under_a_policy_never_show_the_server(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let server = fixture.server.server_pid().await;
    std::os::unix::fs::symlink("/proc/self", fixture.path("work/me")).unwrap();
    let link = fixture.path("work/me").display().to_string();
    let mut choices = Choices(0x1025);
    let mut policies = vec![crate::read_only(), {
        let mut workspace = fixture.workspace();
        workspace["cwd"] = json!(format!("file://{}", fixture.path("work").display()));
        workspace
    }];
    policies.extend((0..6).map(|_| fixture.generated_policy(&mut choices)));
    let of_self = [
        "/proc/self",
        "/proc/thread-self",
        "/proc/../proc/self",
        &link,
    ];
    let of_server = [
        format!("/proc/{server}"),
        format!("/proc/{server}/task/{server}"),
        format!("/proc/self/root/proc/{server}"),
    ];
    let bases = of_self.into_iter().map(str::to_owned).chain(of_server);
    let bases: Vec<String> = bases.collect();
    for sandbox in policies {
        for base in &bases {
            for name in ["environ", "cmdline", "maps", "status", "mem"] {
                let path = format!("{base}/{name}");
                let uri = format!("file://{path}");
                let params = json!({"path": uri, "sandbox": sandbox});
                let search = json!({"path": uri, "sandbox": sandbox, "pattern": ".*",
                    "regex": true, "gitignore": false});
                let mut answers = vec![
                    fixture.client.call("fs/readFile", params.clone()).await,
                    fixture.client.call("fs/search", search).await,
                ];
                let mut open = params.clone();
                open["handleId"] = json!("h");
                if fixture.client.call("fs/open", open).await.is_ok() {
                    let block = json!({"handleId": "h", "offset": 0, "len": 65_536});
                    answers.push(fixture.client.call("fs/readBlock", block).await);
                    let close = json!({"handleId": "h"});
                    fixture.client.ok("fs/close", close).await;
                }
                for found in answers.into_iter().flatten() {
                    let content = match found.get("dataBase64") {
                        Some(data) => String::from_utf8_lossy(&bytes(data)).into_owned(),
                        None => found.to_string(),
                    };
                    assert!(!content.contains(SERVER_SECRET), "{path}: {content}");
                    assert!(!content.contains("--listen"), "{path}: {content}");
                    let status = format!("Pid:\t{server}\n");
                    assert!(!content.contains(&status), "{path}: {content}");
                }
            }
        }
        let watch = json!({"watchId": "w", "path": "file:///proc/self", "sandbox": sandbox});
        let refused = fixture.client.refused("fs/watch", watch).await;
        assert!(!refused.message.contains(&server.to_string()), "{refused}");
    }
}

/// These files are also refused without a sandbox, unless the command may trace every process.
async fn commands_cannot_read_memory_or_environment_of_the_server(user: ServerUser) {
    if user == ServerUser::Own && crate::is_root() {
        return;
    }
    let mut fixture = SandboxFixture::new(user).await;
    let server = fixture.server.server_pid().await;
    let script = format!(
        "for name in environ mem maps auxv; do cat /proc/{server}/$name > /dev/null; done; \
         ls /proc/{server}/fd /proc/{server}/root/"
    );
    let start = StartBuilder::sh("p", &script);
    let outcome = fixture.run(start).await;
    let refusals = outcome.stderr.matches("Permission denied").count();
    assert_eq!((refusals, &*outcome.stdout), (6, ""), "{outcome:?}");
}
