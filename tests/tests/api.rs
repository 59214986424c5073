//! What the control socket answers is what its description says.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{net::SocketAddr, process::Command, time::Duration};

use balancer_tests::{
    Balancer, Plan,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    operator, status,
    topology::{VIP, backend_address},
};
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

/// Asks as anybody may who knows HTTP.
async fn ask(balancer: &Balancer, method: &str, path: &str, body: Option<&Value>) -> (StatusCode, Value) {
    let stream = tokio::net::UnixStream::connect(balancer.place().socket()).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = Request::builder().method(method).uri(path).header("host", "balancer");
    let answer = sender.send_request(request.body(Full::<Bytes>::from(body)).unwrap()).await.unwrap();
    assert_eq!(answer.headers()["content-type"], "application/json", "{path}");
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

/// What of a value is not by the schema that the document has for it.
fn faults(document: &Value, schema: &Value, value: &Value) -> Vec<String> {
    // References lead into the document.
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    validator.iter_errors(value).map(|fault| format!("{fault} at {}", fault.instance_path())).collect()
}

#[track_caller]
fn assert_by(document: &Value, schema: &Value, value: &Value, what: &str) {
    let faults = faults(document, schema, value);
    assert!(faults.is_empty(), "{what}: {faults:?}\n{value:#}");
}

#[test]
fn every_answer_is_by_the_description() {
    let bench = Plan::backends(2).build().unwrap();
    let _echo = Echo::tcp(&bench.backends[0], SocketAddr::from((backend_address(1), BACKEND_PORT))).unwrap();
    let more = "requests = \"exchange\"\nslow-start = \"20s\"\ndrain-timeout = \"1m\"\nhealth = { kind = \"tcp\", interval = \"300ms\" }";
    let services = [
        Service { more, ..Service::new("tcp", "least-response-time", &[1, 1]) },
        Service::new("udp", "maglev", &[1, 0]),
    ];
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    let _stream = bench
        .client
        .run(|| {
            let limit = Duration::from_secs(10);
            status::wait(&balancer, "a backend that serves", |status| {
                status.services[0].backends[0].share > 0.0
            })?;
            Ok(std::net::TcpStream::connect_timeout(&(VIP, VIP_PORT).into(), limit)?)
        })
        .unwrap();
    status::wait(&balancer, "the flow", |status| status.services[0].backends[0].active == 1).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (_, document) = ask(&balancer, "GET", "/v1/openapi.json", None).await;
        let printed =
            operator::run(Command::new(balancer_tests::process::balancer_binary().unwrap()).arg("api"));
        assert_eq!(serde_json::from_str::<Value>(&printed.unwrap().text).unwrap(), document);

        let change = |edit: Value| json!({ "edit": edit });
        let calls = [
            ("GET", "/v1/status", None),
            ("GET", "/v1/openapi.json", None),
            ("POST", "/v1/flows/list", None),
            ("POST", "/v1/flows/list", Some(json!({ "filter": { "state": "established" }, "limit": 1 }))),
            ("POST", "/v1/flows/count", Some(json!({}))),
            ("POST", "/v1/explain", Some(json!({ "service": "tcp" }))),
            ("POST", "/v1/explain", Some(json!({ "service": "udp", "picks": 3 }))),
            ("POST", "/v1/whatif", Some(json!({ "service": "tcp", "method": "round-robin" }))),
            (
                "POST",
                "/v1/whatif",
                Some(json!({ "service": "udp", "method": "least-request", "requests": "flow" })),
            ),
            ("POST", "/v1/config/show", None),
            (
                "POST",
                "/v1/config/change",
                Some(change(
                    json!({ "action": "set", "backend": "b1", "service": "tcp", "keys": { "weight": 5 } }),
                )),
            ),
            (
                "POST",
                "/v1/config/change",
                Some(change(json!({ "action": "remove", "backend": "b2", "service": "udp" }))),
            ),
            ("POST", "/v1/config/rollback", None),
            ("POST", "/v1/backend/drain", Some(json!({ "backend": "b1", "service": "tcp" }))),
            ("GET", "/v1/status", None),
            ("POST", "/v1/backend/enable", Some(json!({ "backend": "b1", "service": "tcp" }))),
            ("POST", "/v1/flows/kill", Some(json!({ "all": true }))),
        ];
        for (method, path, request) in &calls {
            let operation = &document["paths"][path][method.to_lowercase()];
            assert!(operation.is_object(), "{method} {path}");
            if let Some(request) = request {
                let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
                assert_by(&document, schema, request, path);
            }
            let (status, answer) = ask(&balancer, method, path, request.as_ref()).await;
            assert_eq!(status, StatusCode::OK, "{path}: {answer}");
            let schema = &operation["responses"]["200"]["content"]["application/json"]["schema"];
            assert_by(&document, schema, &answer, path);
            // What is something else is told from it.
            let is_described = *path != "/v1/openapi.json";
            assert_eq!(faults(&document, schema, &json!({})).is_empty(), !is_described, "{path}");
        }
        // Each path that is described was asked for.
        for path in document["paths"].as_object().unwrap().keys() {
            assert!(calls.iter().any(|(_, called, _)| called == path), "{path}");
        }

        let unknown = json!({ "service": "wep" });
        let wrong = json!({ "servcie": "web" });
        for (path, request, expected) in [
            ("/v1/explain", &unknown, StatusCode::NOT_FOUND),
            ("/v1/explain", &wrong, StatusCode::UNPROCESSABLE_ENTITY),
        ] {
            let (status, answer) = ask(&balancer, "POST", path, Some(request)).await;
            assert_eq!(status, expected, "{answer}");
            let responses = &document["paths"][path]["post"]["responses"];
            let schema = &responses[status.as_str()]["content"]["application/json"]["schema"];
            assert_by(&document, schema, &answer, path);
        }
    });
}
