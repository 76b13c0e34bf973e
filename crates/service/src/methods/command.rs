//! Implementation of `command/exec*`, the first protocol generation, on the same process code as
//! `process/*`.

use std::path::PathBuf;

use exec_server_engine::{env, request};
use exec_server_executor::log::Retention;
use exec_server_executor::process::TerminationMethod;
use exec_server_executor::{ProcessSpec, PtySize, Stdio};
use exec_server_protocol::PathUri;
use exec_server_protocol::command::{
    ExecParams, ExecResult, ExecTerminateParams, ExecTerminateResult, ExecWriteParams,
    ExecWriteResult,
};
use exec_server_protocol::process::WriteStatus;

use super::process::{ProcessDescription, launch};
use crate::ApiError;
use crate::connection::RequestResponder;
use crate::dispatch::CheckedRequest;
use crate::follow::NotificationFamily;

pub(crate) fn exec(call: CheckedRequest<'_>, params: ExecParams) {
    let session = call.session;
    if params.argv.is_empty() {
        return call
            .responder
            .send_error(ApiError::invalid_params("argv must not be empty"));
    }
    let native = PathBuf::from(&params.cwd);
    let Ok(cwd) = PathUri::from_native(&native) else {
        let message = format!("cwd `{}` is not an absolute path", params.cwd);
        return call.responder.send_error(ApiError::invalid_params(message));
    };
    let executor = call.connection.server.executor();
    let mut env = env::build(&executor.config().environment, None, &params.env);
    let stdio = if params.tty {
        request::add_shell(&mut env);
        Stdio::Terminal(PtySize::default())
    } else {
        Stdio::Pipes { stdin: false }
    };
    let most = executor.limits().retention;
    let retention = params.output_bytes_cap.map(|cap| Retention {
        bytes: usize::try_from(cap).unwrap_or(usize::MAX).min(most.bytes),
        ..most
    });
    let spec = ProcessSpec {
        argv: params.argv.clone(),
        cwd: native,
        env,
        arg0: params.arg0,
        stdio,
        retention,
        ..ProcessSpec::default()
    };
    let result = ExecResult {
        process_id: params.process_id.clone(),
        running: true,
        exit_code: None,
        stdout: None,
        stderr: None,
    };
    let description = ProcessDescription {
        process_id: params.process_id,
        argv: params.argv,
        cwd,
        dialect: NotificationFamily::Command,
        start_id: None,
        snapshot: None,
        network: None,
    };
    launch(
        call.connection,
        session,
        spec,
        description,
        call.responder,
        |_| result,
    );
}

pub(crate) fn write(call: CheckedRequest<'_>, params: ExecWriteParams) {
    let session = call.session;
    let ExecWriteParams { process_id, chunk } = params;
    let responder = call.responder;
    session.with_process(&process_id.clone(), move |managed| match managed {
        None => responder.send_error(ApiError::unknown_process(&process_id)),
        Some(managed) if !managed.process.has_terminal() => {
            let message = format!("stdin of process {process_id} is closed: it is not a tty");
            responder.send_error(ApiError::invalid_request(message));
        }
        Some(managed) => managed.write(chunk.0, None, responder, accepted),
    });
}

fn accepted(responder: RequestResponder, status: WriteStatus) {
    responder.send(match status {
        WriteStatus::Accepted => Ok(ExecWriteResult { accepted: true }),
        _ => Err(ApiError::invalid_request("the process has ended")),
    });
}

pub(crate) fn terminate(call: CheckedRequest<'_>, params: ExecTerminateParams) {
    let session = call.session;
    let responder = call.responder;
    session.with_process(&params.process_id, move |managed| {
        let running =
            managed.is_some_and(|managed| managed.process.terminate(TerminationMethod::Now));
        responder.send(Ok(ExecTerminateResult { running }));
    });
}
