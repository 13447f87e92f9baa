module railmate.dev/hack/tools/bench

go 1.24
