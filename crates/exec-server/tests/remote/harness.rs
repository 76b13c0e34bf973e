//! `--url registry://…`, and the failures that a harness survives.

use std::time::Duration;

use exec_server::registry::{RegistryAuth, RegistryConnectArgs, RegistryConnectError};
use exec_server::transport::Link;
use exec_server::{
    ExecBackend as _, ExecProcessEvent, ExecServer, ExecServerClient, ExecServerConfig,
    ExecServerError, SessionLifetime,
};
use exec_server_testkit::proc::TIMEOUT;
use exec_server_testkit::proxy;
use exec_server_transport::frame::WebsocketRole;
use exec_server_transport::http::{HeadKind, accept_key, read_head};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::stage::{CuttableProxy, Deployment, RunningProgram, finished, program};
use super::{collect, lines, sh};

/// Reads the output of a process up to this length.
async fn read(events: &mut exec_server::ExecProcessEvents, output: &mut Vec<u8>, length: usize) {
    while output.len() < length {
        match timeout(TIMEOUT, events.recv()).await.unwrap() {
            Some(ExecProcessEvent::Output { chunk, .. }) => output.extend_from_slice(&chunk),
            Some(ExecProcessEvent::Failed(failure)) => panic!("{failure}"),
            Some(ExecProcessEvent::Gap { bytes, .. }) => panic!("{bytes:?} bytes were lost"),
            Some(_) => {}
            None => panic!("the end after {} bytes", output.len()),
        }
    }
}

async fn exit_code(events: &mut exec_server::ExecProcessEvents) -> i64 {
    loop {
        match timeout(TIMEOUT, events.recv()).await.unwrap().unwrap() {
            ExecProcessEvent::Exited { exit, .. } => return exit.exit_code.into(),
            ExecProcessEvent::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn every_command_accepts_a_registry_url() {
    let deployment = Deployment::new().await;
    let _executor = deployment.attached("box").await;
    let run = async |command: &[&str]| {
        let output = finished(deployment.harness("box", command)).await;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), stdout, stderr)
    };
    let (code, stdout, stderr) = run(&["run", "--", "sh", "-c", "pwd; exit 5"]).await;
    assert_eq!(code, Some(5), "{stderr}");
    let there = deployment.path("box");
    assert_eq!(stdout.trim(), there.to_str().unwrap(), "{stderr}");
    assert!(stderr.contains("first use of registry://"), "{stderr}");
    let (code, stdout, stderr) = run(&["ps"]).await;
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("SESSION"), "{stdout}");
    assert_eq!(stderr, "", "the second time it is known");

    let file = deployment.path("file");
    std::fs::write(&file, "content").unwrap();
    let file = file.to_str().unwrap();
    let url = format!("registry://{}/box", deployment.address());
    let there = format!("{url}:copy");
    let (code, _, stderr) = run(&["cp", file, &there]).await;
    assert_eq!(code, Some(0), "{stderr}");
    let (code, stdout, stderr) = run(&["fs", "--on", &url, "cat", "copy"]).await;
    assert_eq!((code, stdout.as_str()), (Some(0), "content"), "{stderr}");
    let (code, stdout, stderr) = run(&["status", "--json"]).await;
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains(&url), "{stdout}");
    let (code, _, stderr) = run(&["kill", "no-such"]).await;
    assert_eq!(code, Some(1), "{stderr}");
}

#[tokio::test]
async fn registry_errors_have_a_hint() {
    let deployment = Deployment::new().await;
    let output = finished(deployment.harness("nobody", &["ps"])).await;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("hint: no machine serves"), "{stderr}");
    let mut command = deployment.harness("box", &["ps"]);
    command.env_remove("EXEC_SERVER_TOKEN_FILE");
    let output = finished(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        stderr.contains("a token is needed for the registry") && stderr.contains("--token-file"),
        "{stderr}"
    );
}

#[tokio::test]
async fn cut_sockets_lose_no_output_of_a_long_command() {
    let deployment = Deployment::new().await;
    let _executor = deployment.attached("box").await;
    let proxy = CuttableProxy::new(deployment.address()).await;
    let mut args = deployment.args("box");
    args.registry_url = format!("http://{}", proxy.address);
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    let session = client.session_id().to_owned();
    let script = "for i in 0 1 2 3 4 5 6 7 8 9; do seq 1 5000; sleep 1; done; echo end; exit 0";
    let process = client.start(sh("p", script)).await.unwrap().process;
    let mut events = process.events().unwrap();
    let block = lines(5000);
    let mut output = Vec::new();
    let mut cuts = 0;
    for round in 1..=10 {
        read(&mut events, &mut output, round * block.len()).await;
        cuts += proxy.cut();
    }
    let expected = [block.repeat(10).as_slice(), b"end\n"].concat();
    read(&mut events, &mut output, expected.len()).await;
    assert!(output == expected, "{} bytes", output.len());
    assert_eq!(exit_code(&mut events).await, 0);
    assert!(cuts >= 10, "{cuts} connections were cut");
    assert_eq!(client.session_id(), session);
}

/// The longest outage that compatible clients survive as well: they try for 45 s.
#[tokio::test]
async fn outage_of_42_s_on_the_way_to_the_rendezvous_server_loses_no_output() {
    const OUTAGE: Duration = Duration::from_secs(42);
    let deployment = Deployment::new().await;
    let _executor = deployment.attached("one").await;
    let outage = proxy::Outage::proxy(deployment.address()).await;
    let url = format!("http://127.0.0.1:{}", outage.port());
    let auth = RegistryAuth::bearer(deployment.token("harness"));
    let args = RegistryConnectArgs::new(url, "one", auth, "test");
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    let session = client.session_id();
    // It writes before, during and after the outage.
    let script = "for i in $(seq 1 44); do echo $i; sleep 1; done; read x; echo got $x; exit 4";
    let process = client.start(sh("p", script)).await.unwrap().process;
    let mut events = process.events().unwrap();
    let mut output = Vec::new();
    read(&mut events, &mut output, 2).await;
    outage.occur(OUTAGE, Duration::ZERO).await;
    let expected = lines(44);
    read(&mut events, &mut output, expected.len()).await;
    process.write("in\n".into()).await.unwrap();
    let expected = [expected.as_slice(), b"got in\n"].concat();
    read(&mut events, &mut output, expected.len()).await;
    assert_eq!(
        String::from_utf8(output).unwrap(),
        String::from_utf8(expected).unwrap()
    );
    assert_eq!(exit_code(&mut events).await, 4);
    assert_eq!(client.session_id(), session);
}

#[tokio::test]
async fn restarted_rendezvous_server_loses_no_output() {
    const STREAMS: usize = 50;
    let mut deployment = Deployment::new().await;
    let _one = deployment.attached("one").await;
    let _two = deployment.attached("two").await;
    let script = "seq 1 20000; read x; seq 1 20000; read x; echo end; exit 4";
    let block = lines(20_000);
    let mut opening = JoinSet::new();
    for n in 0..STREAMS {
        let (args, length) = (deployment.args(["one", "two"][n % 2]), block.len());
        opening.spawn(async move {
            let client = ExecServerClient::connect_registry(args).await.unwrap();
            let process = client.start(sh("p", script)).await.unwrap().process;
            let mut events = process.events().unwrap();
            let mut output = Vec::new();
            read(&mut events, &mut output, length).await;
            (client, process, events, output)
        });
    }
    let mut streams = opening.join_all().await;
    for round in 1..=2 {
        deployment.die().await;
        // The request is sent while no rendezvous server runs.
        let mut writes = Vec::new();
        for (_, process, ..) in &streams {
            let process = std::sync::Arc::clone(process);
            writes.push(tokio::spawn(
                async move { process.write("\n".into()).await },
            ));
        }
        deployment.open().await;
        for write in writes {
            timeout(TIMEOUT, write).await.unwrap().unwrap().unwrap();
        }
        let wanted = if round == 1 {
            2 * block.len()
        } else {
            2 * block.len() + 4
        };
        for (_, _, events, output) in &mut streams {
            read(events, output, wanted).await;
        }
    }
    let expected = [block.repeat(2).as_slice(), b"end\n"].concat();
    for (_, _, events, output) in &mut streams {
        assert!(*output == expected, "{} bytes", output.len());
        assert_eq!(exit_code(events).await, 4);
    }
    // New connections are accepted as well.
    let client = deployment.connect("one").await;
    assert_eq!(collect(&client, "q", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn restarted_executor_is_recognized_by_its_key() {
    let deployment = Deployment::new().await;
    let executor = deployment.attached("box").await;
    let mut args = deployment.args("box");
    let known = deployment.path("known");
    args.trust = exec_server::registry::KeyTrust::FirstUse(
        exec_server::registry::KnownEnvironments::new(&known),
    );
    let client = ExecServerClient::connect_registry(args.clone())
        .await
        .unwrap();
    let process = client
        .start(sh("p", "echo ready; sleep 60"))
        .await
        .unwrap()
        .process;
    let mut events = process.events().unwrap();
    read(&mut events, &mut Vec::new(), 6).await;
    executor.end(Signal::TERM).await;
    // The old session has ended, and the error reports that.
    let over = async {
        while let Some(event) = events.recv().await {
            if matches!(
                event,
                ExecProcessEvent::Exited { .. } | ExecProcessEvent::Failed(_)
            ) {
                return;
            }
        }
    };
    timeout(TIMEOUT, over).await.unwrap();
    let _executor = deployment.attached("box").await;
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn changed_executor_key_is_refused_until_it_is_trusted() {
    let deployment = Deployment::new().await;
    let executor = deployment.attached("box").await;
    let run = || finished(deployment.harness("box", &["run", "--", "echo", "hi"]));
    assert_eq!(run().await.stdout, b"hi\n");
    executor.end(Signal::TERM).await;
    let identity = deployment.path("box/.local/state/exec-server/executor.identity");
    std::fs::remove_file(identity).unwrap();
    let _executor = deployment.attached("box").await;
    let output = run().await;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(stderr.contains("has changed"), "{stderr}");
    assert!(stderr.contains("exec-server env trust"), "{stderr}");
    assert_eq!(output.stdout, b"");

    let url = format!("registry://{}/box", deployment.address());
    let output = finished(deployment.harness("box", &["env", "trust", &url])).await;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(run().await.stdout, b"hi\n");
    let output = finished(deployment.harness("box", &["env", "trust", "--list"])).await;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(listed.lines().count(), 1, "{listed}");
    assert!(listed.starts_with(&format!("{url} ")), "{listed}");
    // Another key can be pinned, and the pin overrides the registry.
    let other = "0".repeat(64);
    let pin = ["env", "trust", &url, "--fingerprint", &other];
    assert!(
        finished(deployment.harness("box", &pin))
            .await
            .status
            .success()
    );
    let output = run().await;
    assert!(String::from_utf8_lossy(&output.stderr).contains(&other));
}

/// Sends a request to the rendezvous server as its admin.
async fn post(deployment: &Deployment, path: &str, body: &Value) -> u16 {
    let body = body.to_string();
    let mut stream = TcpStream::connect(deployment.address()).await.unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\
         Content-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        deployment.token("admin"),
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream, HeadKind::Response).await.unwrap();
    let _ = stream.read_to_end(&mut Vec::new()).await;
    head.status
}

/// A revocation may take this long: one second is documented, the rest is for busy machines.
const SOON: Duration = Duration::from_secs(3);

#[tokio::test]
async fn revoked_harness_is_disconnected_and_stays_refused() {
    let deployment = Deployment::new().await;
    let _executor = deployment.attached("box").await;
    let args = deployment.args("box");
    let key = args.identity.public_key().fingerprint();
    let client = ExecServerClient::connect_registry(args.clone())
        .await
        .unwrap();
    let other = deployment.connect("box").await;
    let revocation = json!({"harness": format!("key:{key}"), "environment_id": "box"});
    let status = post(&deployment, "/cloud/revoke", &revocation).await;
    assert!((200..300).contains(&status), "HTTP {status}");
    let mut closed = client.closed();
    let closed = closed.wait_for(Option::is_some);
    timeout(SOON, closed).await.unwrap().unwrap();
    let error = ExecServerClient::connect_registry(args).await.unwrap_err();
    assert!(
        matches!(
            &error,
            ExecServerError::Registry(RegistryConnectError::Registry(_))
        ),
        "{error}"
    );
    assert!(error.to_string().contains("403"), "{error}");
    // Other harnesses are unaffected.
    assert_eq!(collect(&other, "p", "echo in").await.0, b"in\n");
}

/// A server that reports the end of each connection.
async fn server_reporting_disconnects() -> (String, mpsc::UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    let (gone, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let server = ExecServer::new(ExecServerConfig::default()).unwrap();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_head(&mut stream, HeadKind::Request).await.unwrap();
            let accept = accept_key(head.websocket_key().unwrap());
            let answer = format!(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Accept: {accept}\r\n\r\n"
            );
            stream.write_all(answer.as_bytes()).await.unwrap();
            let (reader, writer) = stream.into_split();
            let link = Link::websocket(WebsocketRole::Server, reader, writer, head.rest);
            let serving = server.serve(link, "forwarded".to_owned(), SessionLifetime::Resumable);
            let gone = gone.clone();
            tokio::spawn(async move {
                serving.await;
                let _ = gone.send(());
            });
        }
    });
    (url, receiver)
}

#[tokio::test]
async fn revoked_harness_is_disconnected_at_the_executor() {
    let deployment = Deployment::new().await;
    // The server behind the executor learns of the end only from the executor.
    let (url, mut gone) = server_reporting_disconnects().await;
    let mut forward = program(&deployment.path("box"));
    std::fs::create_dir_all(deployment.path("box")).unwrap();
    forward
        .args(["forward", "--connect", &url, "--remote", &deployment.url()])
        .args(["--environment-id", "box", "--remote-token-file"])
        .arg(deployment.path("rendezvous/executor.token"));
    let _executor = RunningProgram::start(forward).await;
    let args = deployment.args("box");
    let key = args.identity.public_key().fingerprint();
    let client = ExecServerClient::connect_registry(args).await.unwrap();
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
    assert!(gone.try_recv().is_err());
    let revocation = json!({"harness": format!("key:{key}")});
    let status = post(&deployment, "/cloud/revoke", &revocation).await;
    assert!((200..300).contains(&status), "HTTP {status}");
    let began = std::time::Instant::now();
    timeout(SOON, gone.recv()).await.unwrap().unwrap();
    println!("the executor ended the stream after {:?}", began.elapsed());
}
