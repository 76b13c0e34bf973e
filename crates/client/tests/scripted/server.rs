//! Scripted server: the server end of a link, controlled by a test.

use std::time::Duration;

use exec_server_client::protocol::PathUri;
use exec_server_client::protocol::process::StartParams;
use exec_server_client::{
    ExecBackend as _, ExecServerClient, ExecServerClientConnectOptions, StartedProcess,
};
use exec_server_transport::{Link, LinkEvent};
use serde_json::{Value, json};

/// Server end of a link. Each failed expectation panics.
pub(crate) struct ScriptedServer {
    link: Link,
}

/// Received request that has no response yet.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    id: Value,
    pub(crate) params: Value,
}

impl ScriptedServer {
    pub(crate) fn new(link: Link) -> Self {
        Self { link }
    }

    /// The next message; `None` if the client has closed the link.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        match self.link.incoming.recv().await.unwrap() {
            Some(LinkEvent::Message(text)) => Some(serde_json::from_str(text).unwrap()),
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    }

    /// The next message, which must be a request for this method.
    pub(crate) async fn expect(&mut self, method: &str) -> PendingRequest {
        let message = self.next().await.expect(method);
        assert_eq!(message["method"], method, "{message}");
        PendingRequest {
            id: message["id"].clone(),
            params: message["params"].clone(),
        }
    }

    pub(crate) async fn answer(&mut self, request: PendingRequest, result: Value) {
        self.send(json!({"id": request.id, "result": result})).await;
    }

    pub(crate) async fn refuse(&mut self, request: PendingRequest, code: i64, message: &str) {
        let error = json!({"code": code, "message": message});
        self.send(json!({"id": request.id, "error": error})).await;
    }

    /// Expects a request for this method and sends the result. Returns the parameters.
    pub(crate) async fn serve(&mut self, method: &str, result: Value) -> Value {
        let request = self.expect(method).await;
        let params = request.params.clone();
        self.answer(request, result).await;
        params
    }

    pub(crate) async fn notify(&mut self, method: &str, params: Value) {
        self.send(json!({"method": method, "params": params})).await;
    }

    pub(crate) async fn output(&mut self, seq: u64, text: &str) {
        self.notify(
            "process/output",
            json!({"processId": "p", "seq": seq, "stream": "stdout", "chunk": base64(text)}),
        )
        .await;
    }

    pub(crate) async fn exited(&mut self, seq: u64, exit_code: i32) {
        self.notify(
            "process/exited",
            json!({"processId": "p", "seq": seq, "exitCode": exit_code}),
        )
        .await;
    }

    pub(crate) async fn closed(&mut self, seq: u64) {
        self.notify("process/closed", json!({"processId": "p", "seq": seq}))
            .await;
    }

    pub(crate) async fn send(&mut self, message: Value) {
        self.raw(&message.to_string()).await;
    }

    pub(crate) async fn raw(&mut self, text: &str) {
        self.link
            .outgoing
            .push_message(text.len(), |out| out.extend_from_slice(text.as_bytes()));
        self.link.outgoing.flush().await.unwrap();
    }
}

/// A connected client, and its server that supports these extensions.
pub(crate) async fn connected(extensions: &[&str]) -> (ExecServerClient, ScriptedServer) {
    connected_with(ExecServerClientConnectOptions::new("test"), extensions).await
}

pub(crate) async fn connected_with(
    options: ExecServerClientConnectOptions,
    extensions: &[&str],
) -> (ExecServerClient, ScriptedServer) {
    let (here, there) = Link::pair();
    let mut server = ScriptedServer::new(there);
    let script = async {
        server
            .serve(
                "initialize",
                json!({"sessionId": "s", "environmentInfo": info(extensions)}),
            )
            .await;
        server.expect("initialized").await;
    };
    let (client, ()) = tokio::join!(ExecServerClient::from_link(here, options), script);
    (client.unwrap(), server)
}

/// A connected client with a started process `p`.
pub(crate) async fn started(
    extensions: &[&str],
) -> (ExecServerClient, ScriptedServer, StartedProcess) {
    let (client, mut server) = connected(extensions).await;
    let script = server.serve(
        "process/start",
        json!({"processId": "p", "sandboxType": "none"}),
    );
    let (process, _) = tokio::join!(client.start(start_params()), script);
    (client, server, process.unwrap())
}

pub(crate) fn start_params() -> StartParams {
    StartParams {
        process_id: "p".to_owned(),
        argv: vec!["cat".to_owned()],
        cwd: PathUri::parse("file:///").unwrap(),
        ..StartParams::default()
    }
}

pub(crate) fn info(extensions: &[&str]) -> Value {
    json!({"shell": {"name": "sh", "path": "/bin/sh"}, "extensions": extensions})
}

/// The response to `process/read` for a running process.
pub(crate) fn read(chunks: &[(u64, &str)], next_seq: u64) -> Value {
    let chunks: Vec<_> = chunks
        .iter()
        .map(|(seq, text)| json!({"seq": seq, "stream": "stdout", "chunk": base64(text)}))
        .collect();
    json!({"chunks": chunks, "nextSeq": next_seq, "exited": false, "exitCode": null, "closed": false})
}

/// Fails instead of waiting forever. With the paused clock the timeout takes no real time.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(3600), future)
        .await
        .expect("it hangs")
}

pub(crate) fn base64(text: &str) -> Value {
    let chunk = exec_server_client::protocol::ByteChunk::from(text.as_bytes());
    serde_json::to_value(chunk).unwrap()
}
